"""Calibration: the rates of this machine, measured with kvkeep's own parts, in less than a minute."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.memory.places import Disk
from kvkeep.models.blocks import quantised
from kvkeep.models.packed import PackedLinear
from kvkeep.plan.estimate import DTYPE, described, device_bytes, host_bytes
from kvkeep.plan.machine import MEASURED, Curve, Machine
from kvkeep.plan.rates import only_one, rates_file, store
from kvkeep.plan.trial import PACKED_BITS, packs, with_layers

COLD = 128 * 2**20
"""Bytes that a product's matrices take together: no cache keeps them from one round to the next."""

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
WIDTHS = (512, 2048)


Tell = Callable[[str], None]


def measure_here(device: str = "cpu", dtype: torch.dtype = DTYPE, tell: Tell = lambda part: None) -> Path:
    """Measure this machine, keep its rates for :func:`~kvkeep.plan.rates.machine_here`, and return their file. tell:
    gets what is measured next. Raises BusyError while another process does so, KvkeepError where they cannot be kept.
    """
    path = rates_file(device, dtype)
    with only_one(path.parent):
        store(calibrate(device, dtype, tell), path)
    return path


@torch.inference_mode()
def calibrate(device: str = "cpu", dtype: torch.dtype = DTYPE, tell: Tell = lambda part: None) -> Machine:
    """Measure. device, dtype: what models will run on and in."""
    lab = _Lab(device, dtype)
    tell("memory and disk")
    (read, copied), (disk, cold, written), link = lab.memory(), lab.disk(), lab.link()
    tell("products")
    matrix = {width: lab.matrix(width) for width in WIDTHS}
    tell("attention")
    attention = tuple((float(rows), lab.attention(rows)) for rows in ROWS)
    causal = tuple((float(tokens), lab.causal(tokens)) for tokens in (256, 1024, 4096))
    machine = Machine(
        name=described(device, dtype),
        source=MEASURED,
        device=device.partition(":")[0],
        dtype_bytes=dtype.itemsize,
        matrix=matrix,
        attention=attention,
        causal=causal,
        elementwise=copied,
        memory=read,
        copy=copied,
        link=link,
        disk=disk,
        disk_cold=cold,
        disk_write=written,
        layer_s=0.0,
        bounded_s=0.0,
        page_s=0.0,
        memory_bytes=device_bytes(device),
        host_bytes=host_bytes(),
    )
    tell("layers")
    return with_layers(machine, device, dtype)


class _Lab:
    """Made-up tensors on one device, and a clock."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.random = torch.Generator().manual_seed(0)

    def make(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device, self.dtype)

    def seconds(self, call: Callable[[], Any], rounds: int = 5, patience: float = 0.6) -> float:
        """Return the median of a few rounds after one to warm up, fewer once ``patience`` seconds have gone by."""
        call()
        took: list[float] = []
        while len(took) < rounds and (not took or sum(took) < patience):
            self._wait()
            start = time.perf_counter()
            call()
            self._wait()
            took.append(time.perf_counter() - start)
        return median(took)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def matrix(self, width: int) -> Curve:
        """Return operations a second by rows, of products as a loaded model has them."""
        weight = self.make(3 * width, width)
        if packs(self.device, self.dtype):
            first: Callable[[Tensor], Tensor] = PackedLinear(quantised(weight, PACKED_BITS))
            size = first.nbytes  # type: ignore[attr-defined]
        else:
            first, size = partial(F.linear, weight=weight), weight.nbytes
        products = [first, *(deepcopy(first) for _ in range(COLD // size))]

        def rate(rows: int) -> float:
            count = len(products) if rows <= 64 else max(1, 2**23 // weight.numel())
            x = self.make(rows, width)
            took = self.seconds(lambda: [product(x) for product in products[:count]])
            return 2 * rows * count * weight.numel() / took

        return tuple((float(rows), rate(rows)) for rows in ROWS)

    def attention(self, rows: int, entries: int = 2048, heads: int = 8, dim: int = 64) -> float:
        keys = self.make(1, heads, entries, dim)
        count = max(1, COLD // (2 * keys.nbytes)) if rows <= 16 else 2
        held = [Segment(keys.clone(), keys.clone()) for _ in range(count)]
        query = self.make(1, heads, rows, dim)
        took = self.seconds(lambda: [attend(query, (one,), 0.125) for one in held])
        return 4 * rows * heads * entries * dim * count / took

    def causal(self, tokens: int, heads: int = 8, dim: int = 64) -> float:
        query, keys = self.make(1, heads, tokens, dim), self.make(1, heads, tokens, dim)
        took = self.seconds(lambda: F.scaled_dot_product_attention(query, keys, keys, is_causal=True), rounds=3)
        return 2 * heads * tokens * tokens * dim / took

    def memory(self) -> tuple[float, float]:
        source = self.make(COLD // self.dtype.itemsize)
        target = torch.empty_like(source)
        return COLD / self.seconds(source.sum), COLD / self.seconds(lambda: target.copy_(source))

    def link(self) -> float | None:
        if self.device.type == "cpu":
            return None
        source = torch.empty(COLD, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return COLD / self.seconds(lambda: source.to(self.device))

    def disk(self) -> tuple[float, float, float]:
        """Return bytes a second: read from mapped pages in memory, read from the disk itself, written."""
        mapped = Disk().allocate((COLD // 4,), torch.float32)
        source = torch.zeros(COLD // 4)
        written, warm = self.seconds(lambda: mapped.copy_(source)), self.seconds(mapped.sum)
        cold = warm
        with suppress(OSError, AttributeError), tempfile.NamedTemporaryFile(dir=Disk().folder) as file:
            file.write(bytes(COLD // 4))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            torch.from_file(file.name, shared=True, size=COLD // 16, dtype=torch.float32).sum()
            cold = 4 * (time.perf_counter() - start)
        return COLD / warm, COLD / cold, COLD / written
