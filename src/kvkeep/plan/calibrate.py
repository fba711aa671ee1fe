"""Calibration: measures the rates of this machine with kvkeep's operations, in less than a minute.

The rates of matrices, attention, memory and disk are measured on random tensors. A random model is then run. The time
beyond that of its counted operations is the fixed time of a layer and of a page (launching, waiting for threads,
copying). The planned models are not used.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.cache import KeepCache
from kvkeep.memory.places import Disk
from kvkeep.models.blocks import quantised
from kvkeep.models.packed import PackedLinear
from kvkeep.models.silence import silenced
from kvkeep.native.library import library
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.costs import cost
from kvkeep.plan.estimate import DTYPE, described, device_bytes, host_bytes
from kvkeep.plan.machine import MEASURED, Curve, Machine
from kvkeep.plan.rates import only_one, rates_file, store
from kvkeep.plan.shape import shape_of
from kvkeep.plan.sizes import sizes
from kvkeep.policies.methods import methods

COLD_BYTES = 128 * 2**20
"""Bytes of all matrices of one measured product: more than a processor's cache keeps between two rounds."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
WIDTHS = (512, 2048)
PACKED_BITS = 4
"""Bits of the measured weights if models have packed weights, as the embedded models and most files do."""
PROMPT, BUDGET = 512, 128
"""Tokens of the random model's prompt, and entries of its budget."""
PATIENCE_S = 1.0
"""Seconds for the repetitions of one measurement: a slow machine repeats fewer times."""

Tell = Callable[[str], None]


def measure_here(device: str = "cpu", dtype: torch.dtype = DTYPE, tell: Tell = lambda part: None) -> Path:
    """Measure this machine, save its rates for :func:`~kvkeep.plan.rates.machine_here`, and return their file.

    tell: called with the name of each measurement before it starts. Raises BusyError while another process measures,
    and KvkeepError if the rates cannot be saved.
    """
    path = rates_file(device, dtype)
    with only_one(path.parent):
        store(calibrate(device, dtype, tell), path)
    return path


@torch.inference_mode()
def calibrate(device: str = "cpu", dtype: torch.dtype = DTYPE, tell: Tell = lambda part: None) -> Machine:
    """Measure this machine. device, dtype: those that models will use."""
    bench = _Bench(device, dtype)
    tell("memory and disk")
    (read, copied), (disk, cold, written), link = bench.memory(), bench.disk(), bench.link()
    tell("products")
    matrix = {width: bench.matrix(width) for width in WIDTHS}
    tell("attention")
    machine = Machine(
        name=described(device, dtype),
        source=MEASURED,
        device=device.partition(":")[0],
        dtype_bytes=dtype.itemsize,
        matrix=matrix,
        attention=tuple((float(rows), bench.attention(rows)) for rows in ROWS),
        causal=tuple((float(tokens), bench.causal(tokens)) for tokens in (256, 1024, 4096)),
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
    return _with_layers(machine, device, dtype)


class _Bench:
    """Measurements with random tensors on one device."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.random = torch.Generator().manual_seed(0)

    def make(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device, self.dtype)

    def seconds(self, call: Callable[[], Any], rounds: int = 5) -> float:
        def timed() -> float:
            self._wait()
            start = time.perf_counter()
            call()
            self._wait()
            return time.perf_counter() - start

        return _median(timed, rounds)

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def matrix(self, width: int) -> Curve:
        """Return operations a second by rows, for products with weights in the format of a loaded model."""
        weight = self.make(3 * width, width)
        product: Any = partial(F.linear, weight=weight)
        nbytes = weight.nbytes
        if _packs(self.device, self.dtype):
            product = PackedLinear(quantised(weight, PACKED_BITS))
            nbytes = product.nbytes
        products = [product, *(deepcopy(product) for _ in range(COLD_BYTES // nbytes))]

        def rate(rows: int) -> float:
            used = products if rows <= 64 else products[: max(1, 2**23 // weight.numel())]
            x = self.make(rows, width)
            return 2 * rows * len(used) * weight.numel() / self.seconds(lambda: [one(x) for one in used])

        return tuple((float(rows), rate(rows)) for rows in ROWS)

    def attention(self, rows: int, entries: int = 2048, heads: int = 8, dim: int = 64) -> float:
        keys = self.make(1, heads, entries, dim)
        count = max(1, COLD_BYTES // (2 * keys.nbytes)) if rows <= 16 else 2
        segments = [Segment(keys.clone(), keys.clone()) for _ in range(count)]
        query = self.make(1, heads, rows, dim)
        seconds = self.seconds(lambda: [attend(query, (one,), 0.125) for one in segments])
        return 4 * rows * heads * entries * dim * count / seconds

    def causal(self, tokens: int, heads: int = 8, dim: int = 64) -> float:
        query, keys = self.make(1, heads, tokens, dim), self.make(1, heads, tokens, dim)
        call = partial(F.scaled_dot_product_attention, query, keys, keys, is_causal=True)
        return 2 * heads * tokens * tokens * dim / self.seconds(call, rounds=3)

    def memory(self) -> tuple[float, float]:
        source = self.make(COLD_BYTES // self.dtype.itemsize)
        target = torch.empty_like(source)
        return COLD_BYTES / self.seconds(source.sum), COLD_BYTES / self.seconds(lambda: target.copy_(source))

    def link(self) -> float | None:
        if self.device.type == "cpu":
            return None
        source = torch.empty(COLD_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return COLD_BYTES / self.seconds(lambda: source.to(self.device))

    def disk(self) -> tuple[float, float, float]:
        """Return three rates in bytes a second: reads of mapped pages in memory, reads from the disk, writes."""
        mapped = Disk().allocate((COLD_BYTES // 4,), torch.float32)
        source = torch.zeros(COLD_BYTES // 4)
        written, warm = self.seconds(lambda: mapped.copy_(source)), self.seconds(mapped.sum)
        cold = warm
        with suppress(OSError, AttributeError), tempfile.NamedTemporaryFile(dir=Disk().folder) as file:
            file.write(bytes(COLD_BYTES // 4))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            torch.from_file(file.name, shared=True, size=COLD_BYTES // 16, dtype=torch.float32).sum()
            cold = 4 * (time.perf_counter() - start)
        return COLD_BYTES / warm, COLD_BYTES / cold, COLD_BYTES / written


# -- fixed times ------------------------------------------------------------------------------------------


def _with_layers(machine: Machine, device: str, dtype: torch.dtype) -> Machine:
    """Return ``machine`` with measured fixed times of layers and pages, and the rate of elementwise operations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with silenced():
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4 * PROMPT,
        )
        model = LlamaForCausalLM(config).to(device, dtype).eval()
        if _packs(torch.device(device), dtype):
            for name, module in list(model.named_modules()):
                if isinstance(module, torch.nn.Linear):
                    model.set_submodule(name, PackedLinear(quantised(module.weight, PACKED_BITS)))
    shape = shape_of(config, dtype.itemsize)
    for rate, candidate in _trials():
        budget = None if candidate.keeps_all else BUDGET
        size = sizes(shape.geometry, candidate, PROMPT, budget, shared=machine.shared)
        predicted = partial(cost, shape, candidate, size, acceptance=1.0)
        prompt_s, step_s = _run(model, candidate, budget)
        base, unit = predicted(machine=machine), predicted(machine=_with(machine, rate, 1.0))
        machine = _with(machine, rate, max(0.0, (step_s - base.step) / (unit.step - base.step)))
        if candidate.keeps_all:
            base = predicted(machine=machine)
            slower = predicted(machine=replace(machine, elementwise=machine.elementwise / 2))
            factor = 1 + max(0.0, (prompt_s - base.prefill) / (slower.prefill - base.prefill))
            machine = replace(machine, elementwise=machine.elementwise / factor)
    return machine


def _with(machine: Machine, rate: str, seconds: float) -> Machine:
    changed: dict[str, Any] = {rate: seconds}
    return replace(machine, **changed)


def _trials() -> Iterator[tuple[str, Candidate]]:
    """Yield each fixed time with a cache whose step includes it and otherwise only fixed times measured before."""
    every = methods().values()
    yield "layer_s", Candidate(next(one for one in every if one.selector.keeps_all))
    yield "bounded_s", Candidate(next(one for one in every if one.selector.by_age and not one.store_fate.keeps))
    yield (
        "page_s",
        Candidate(next(one for one in every if one.fate.checkpoints and one.selector.in_order), "kv", "device"),
    )


def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether models in ``dtype`` on ``device`` have packed weights that the native library multiplies."""
    return device.type == "cpu" and dtype == torch.bfloat16 and library() is not None


def _run(model: torch.nn.Module, candidate: Candidate, budget: int | None) -> tuple[float, float]:
    """Return the median seconds of a prompt and of a step. The first run of each warms up and is not counted."""
    given = {name: value for name, value in candidate.options(budget).items() if value is not None}
    cache = KeepCache(model, candidate.spec, **given)
    ids = torch.zeros(1, PROMPT, dtype=torch.long, device=next(model.parameters()).device)

    def timed(ids: Tensor) -> float:
        start = time.perf_counter()
        model(ids, cache=cache, logits_to_keep=1).logits[0, -1, 0].item()  # waits for the device
        return time.perf_counter() - start

    def prompt() -> float:
        cache.reset()
        return timed(ids)

    prompt_s = _median(prompt, 3)
    return prompt_s, _median(lambda: timed(ids[:, :1]), 16)


def _median(call: Callable[[], float], rounds: int) -> float:
    """Return the median result of ``call``, in seconds. The first call warms up: it counts only if it alone takes
    PATIENCE_S."""
    first = call()
    times: list[float] = []
    while len(times) < rounds and first + sum(times) < PATIENCE_S:
        times.append(call())
    return median(times or [first])
