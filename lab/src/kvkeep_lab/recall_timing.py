"""Times the ways to get exact keys and values of N evicted tokens in one layer: projecting residuals, reading entries,
or attending in place. Each is measured from every place, with warm and cold buffers (:mod:`kvkeep_lab.buffers`), and
compared with the roofline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.cache import KeepCache
from kvkeep.errors import UnsupportedModelError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.places import PLACES
from kvkeep.models.binding import bind
from kvkeep_lab.buffers import Roofline, Storage, Sweep, faults, roofline
from kvkeep_lab.partial import Interruption
from kvkeep_lab.timing import synchronize

RECOMPUTE, READ, APART, ATTEND = "recompute", "read", "read, entry by entry", "attend in place"
RERUN = {"residual:4": 4, "tokens": 1 << 30}
"""Kinds of checkpoints that run layers again, with the number of layers per stored residual."""

SLOW_TO = 500
WARMTHS = ("warm", "cold")


@dataclass(frozen=True)
class RecallRow:
    """One way to get keys and values of ``n`` tokens in one layer."""

    model: str
    way: str
    """"recompute": the model's projections of ``n`` residuals in one product. "read": a copy of ``n`` entries. "read,
    entry by entry": a copy of each of ``n`` separate entries, then their concatenation. "attend in place": attention of
    one query to them without a copy. "residual:4", "tokens": the recall of these checkpoints, per layer."""
    place: str
    buffers: str
    n: int
    ms: float
    """Minimum milliseconds over all rounds, because other work on the machine only adds time."""
    median_ms: float
    """Median milliseconds over all rounds."""
    roofline_ms: float | None
    """Lower bound by arithmetic; None if it gives no bound."""
    recompute_ratio: float | None
    """Time of "recompute" from the same place with the same buffers, divided by this time (below 1: recomputing is
    faster)."""
    page_faults: int
    """Median of the kernel's count of page faults during one timing."""
    device_bytes: int
    """Median of the kernel's count of bytes from block devices during one timing."""


@dataclass(frozen=True)
class RecallReport:
    """The rows of one model."""

    model: str
    hidden: int
    """Elements d of a residual."""
    width: int
    """Elements w of the entries of a token in one layer."""
    itemsize: int
    layers: list[int]
    """Indices of the measured layers."""
    roofline: Roofline
    break_even_bytes_per_s: float
    rows: list[RecallRow]
    interrupted: bool = False
    """Whether the measurement ended early."""


def places(device: torch.device) -> tuple[str, ...]:
    """Return the distinct places: host memory is the device's for a CPU."""
    return tuple(name for name in PLACES if name != "host" or device.type != "cpu")


def run(
    model: Any,
    name: str,
    *,
    counts: Sequence[int],
    rounds: int = 5,
    slow: bool = False,
    folder: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> RecallReport:
    """Measure ``model`` (called ``name``) at every N of ``counts``, in three layers, ``rounds`` times, interleaved.

    slow: also measure recall that runs complete layers ("tokens", "residual:4"), up to N = ``SLOW_TO`` and in at most
    two rounds. folder: folder for files. An interrupt raises :class:`Interruption` with the report. Raises
    UnsupportedModelError if residuals cannot be projected, StoreError if files cannot be written.
    """
    bench = _Bench(model, counts, folder)
    samples: dict[_Case, list[tuple[float, int, int]]] = {}
    interrupted = False
    steps = [(turn, count) for turn in range(rounds) for count in counts]
    try:
        for done, (turn, count) in enumerate(steps):
            progress(f"{name}, {count} tokens", done, len(steps))
            again = bench.rerun(count) if slow and count <= SLOW_TO and turn < 2 else ()
            for case, sample in chain(bench.samples(count, turn), again):
                samples.setdefault(case, []).append(sample)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        bench.close()
    shape = (bench.hidden, bench.width, bench.itemsize)
    limit = bench.roofline.break_even(bench.hidden, bench.itemsize)
    report = RecallReport(
        name, *shape, bench.layers, bench.roofline, limit, list(bench.rows(name, samples)), interrupted
    )
    if interrupted:
        raise Interruption(report)
    return report


class _Case(NamedTuple):
    way: str
    place: str
    buffers: str
    n: int


@dataclass
class _Operands:
    """Tensors in one place."""

    hidden: Tensor
    """(1, n, d)."""
    entries: list[Tensor]
    """Keys and values, (1, kv_heads, n, dim) each."""
    apart: list[list[Tensor]]
    """The same keys and values, with a tensor for each entry."""
    targets: list[Tensor]
    """Buffers of their shapes on the device."""
    positions: Tensor
    """(1, n)."""


class _Bench:
    """One model, the places, and the operations to time."""

    @torch.inference_mode()
    def __init__(self, model: Any, counts: Sequence[int], folder: str | os.PathLike[str] | None) -> None:
        weight = next(model.parameters())
        self.device, self.dtype, self.itemsize = weight.device, weight.dtype, weight.dtype.itemsize
        self.geometry = ModelGeometry.from_config(model.config, self.itemsize)
        full = [layer for layer in self.geometry.full_layers if layer.owns_entries]
        if not full:
            raise UnsupportedModelError(f"'{self.geometry.model_type}' has no layer that keeps every token's entries.")
        self.layers = sorted({full[0].index, full[len(full) // 2].index, full[-1].index})
        self.model, self.adapter = model, bind(model)
        self.adapter.require("project", self.layers, "recomputing from residuals")
        self.hidden, self.width = self.geometry.hidden_size, full[0].entry_elements
        self.storages = {name: Storage(name, self.device, folder) for name in places(self.device)}
        self.sweep = Sweep(self.device)
        self.roofline = roofline(self.storages, self.sweep, self.device, self.dtype, self.hidden, self.width)
        self._operands = {
            (name, count): self._hold(storage, count) for count in counts for name, storage in self.storages.items()
        }

    def _hold(self, storage: Storage, count: int) -> _Operands:
        """Put residuals and entries of ``count`` tokens in a storage. All layers have one shape and read the same
        tensors."""
        hidden = torch.randn(1, count, self.hidden, generator=torch.Generator().manual_seed(0))
        hidden = hidden.to(self.device, self.dtype)
        positions = torch.arange(count, device=self.device).unsqueeze(0)
        entries = self.adapter.project(self.layers[0], hidden, positions)
        apart = []
        if storage.name == "device":
            apart = [[part[..., slot : slot + 1, :].clone() for slot in range(count)] for part in entries]
        targets = [torch.zeros_like(part) for part in entries]
        return _Operands(storage.put(hidden), [storage.put(part) for part in entries], apart, targets, positions)

    def close(self) -> None:
        """Release all tensors."""
        self._operands.clear()
        for storage in self.storages.values():
            storage.clear()

    @torch.inference_mode()
    def samples(self, count: int, turn: int) -> Iterator[tuple[_Case, tuple[float, int, int]]]:
        """Time every way once for ``count`` tokens in one layer."""
        layer = self.geometry.layers[self.layers[turn % len(self.layers)]]
        for name, storage in self.storages.items():
            for buffers in WARMTHS:
                for way, action in self._ways(layer, self._operands[name, count], buffers == "warm"):
                    yield _Case(way, name, buffers, count), self._time(action, storage, buffers)

    def _ways(self, layer: LayerGeometry, operands: _Operands, warm: bool) -> list[tuple[str, Callable[[], object]]]:
        def recompute() -> object:
            return self.adapter.project(layer.index, operands.hidden.to(self.device), operands.positions)

        def read() -> object:
            into = (
                operands.targets if warm else [torch.empty_like(part, device=self.device) for part in operands.entries]
            )
            return [target.copy_(part) for target, part in zip(into, operands.entries, strict=True)]

        def entry_by_entry() -> object:
            return [torch.cat([entry.clone() for entry in part], dim=-2) for part in operands.apart]

        ways: list[tuple[str, Callable[[], object]]] = [(RECOMPUTE, recompute), (READ, read)]
        if operands.apart:
            ways.append((APART, entry_by_entry))
        heads = self.geometry.attention_heads
        near = operands.entries[0].device == self.device
        if near and layer.key_dim == layer.value_dim and heads % layer.kv_heads == 0:
            query = torch.randn(1, heads, 1, layer.key_dim, device=self.device, dtype=self.dtype)
            segment = Segment(operands.entries[0], operands.entries[1])
            ways.append((ATTEND, lambda: attend(query, [segment], layer.key_dim**-0.5)))
        return ways

    def _time(self, action: Callable[[], object], storage: Storage, buffers: str) -> tuple[float, int, int]:
        """Return seconds, page faults and bytes from a block device of one run of ``action``."""
        if buffers == "warm":
            action()
        else:
            storage.drop_pages()
            self.sweep.run()
        synchronize(self.device)
        before, start = faults(), time.perf_counter()
        result = action()
        synchronize(self.device)
        seconds, after = time.perf_counter() - start, faults()
        del result
        return seconds, after[0] - before[0], after[1] - before[1]

    @torch.inference_mode()
    def rerun(self, count: int) -> Iterator[tuple[_Case, tuple[float, int, int]]]:
        """Time the recall of checkpoints that store fewer residuals and therefore run layers; by layer. Kinds that the
        model family does not support are left out."""
        ids = torch.zeros(1, count, dtype=torch.long, device=self.device)
        for kind, stride in RERUN.items():
            try:
                cache = KeepCache(self.model, "kv-direct", 0, checkpoint=kind, where="device")
            except UnsupportedModelError:
                continue
            self.model(ids, cache=cache, logits_to_keep=1)
            kept: Any = cache.checkpoint
            total = len(self.geometry.layers)
            first = stride if stride < total else 0
            group = range(first, min(first + stride, total))
            kept.begin_forward(True, count)  # drops the entries that the last pass rebuilt

            def recall(kept: Any = kept, group: range = group) -> None:
                for layer in group:
                    for _ in kept.pieces(layer, count):
                        pass

            seconds, minor, read = self._time(recall, self.storages["device"], "cold")
            parts = len(group)
            yield _Case(kind, "device", "cold", count), (seconds / parts, minor // parts, read // parts)

    def rows(self, name: str, samples: dict[_Case, list[tuple[float, int, int]]]) -> Iterator[RecallRow]:
        """Yield the measurements in the order of ways, places and N."""
        best = {case: min(sample[0] for sample in found) for case, found in samples.items()}
        for case in sorted(
            samples, key=lambda case: (list(self.storages).index(case.place), WARMTHS.index(case.buffers))
        ):
            seconds, rival = best[case], best.get(case._replace(way=RECOMPUTE))
            middle, faulted, read = (median(numbers) for numbers in zip(*samples[case], strict=True))
            roof = None
            if case.way == RECOMPUTE:
                roof = 1e3 * self.roofline.recompute_s(case.place, case.n, self.hidden, self.width, self.itemsize)
            elif case.way == READ:
                roof = 1e3 * self.roofline.read_s(case.place, case.n, self.width, self.itemsize)
            ratio = None if rival is None else rival / seconds
            yield RecallRow(name, *case, 1e3 * seconds, 1e3 * middle, roof, ratio, int(faulted), int(read))
