"""What arithmetic alone would take: the machine's matrix rate and bandwidths, measured, and the times they allow."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvkeep_lab.buffers import Storage, Sweep
from kvkeep_lab.timing import synchronize

_BYTES = 64 << 20  # of a copy: more than fits the caches
_ROWS = 2048  # of a product


@dataclass(frozen=True)
class Roofline:
    """The machine, as measured. flops: of a product of the layer's own widths, a second. bandwidth: bytes a second, by
    place, read from there and written to the device: cold sources, buffers that are there already."""

    flops: float
    bandwidth: dict[str, float]

    def recompute_s(self, place: str, n: int, hidden: int, width: int, itemsize: int) -> float:
        """Seconds for keys and values (``width`` elements a token) of ``n`` residuals: fetched, then multiplied."""
        return n * hidden * itemsize / self.bandwidth[place] + 2 * n * hidden * width / self.flops

    def read_s(self, place: str, n: int, width: int, itemsize: int) -> float:
        """Seconds for a copy of them."""
        return n * width * itemsize / self.bandwidth[place]

    def break_even(self, hidden: int, itemsize: int) -> float:
        """Bytes a second below which fetching entries takes longer than multiplying residuals that are at hand already:
        ``2 d / flops`` seconds an element against ``b / bandwidth``."""
        return itemsize * self.flops / (2 * hidden)


@torch.inference_mode()
def measure(
    storages: dict[str, Storage], sweep: Sweep, device: torch.device, dtype: torch.dtype, hidden: int, width: int
) -> Roofline:
    """Return the machine's roofline for products (n, hidden) x (hidden, width), and copies from every storage."""
    left = torch.randn(_ROWS, hidden, device=device, dtype=dtype)
    right = torch.randn(hidden, width, device=device, dtype=dtype)
    target = torch.zeros(_BYTES // dtype.itemsize, device=device, dtype=dtype)
    seconds = _seconds(lambda: left @ right, device, lambda: None)
    bandwidth = {}
    for name, storage in storages.items():
        source = storage.put(torch.zeros_like(target))

        def cool(storage: Storage = storage) -> None:
            storage.drop_pages()
            sweep.run()

        def copy(source: torch.Tensor = source) -> object:
            return target.copy_(source)

        bandwidth[name] = _BYTES / _seconds(copy, device, cool)
        del source, copy
        storage.clear()
    return Roofline(2 * _ROWS * hidden * width / seconds, bandwidth)


def _seconds(action: Callable[[], object], device: torch.device, prepare: Callable[[], object]) -> float:
    action()
    took = []
    for _ in range(9):
        prepare()
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        took.append(time.perf_counter() - start)
    return min(took)  # a bound: what else the machine does is no part of it
