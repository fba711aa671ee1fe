"""Times prefill and decoding of many caches in one run.

Timings on a shared machine drift, so the cases are interleaved over several rounds. The figures are medians, and ratios
to the stock cache of the same run. Token ids are random, because the time of a step is independent of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.engine.answer import forward_one, graph_for
from kvkeep.engine.batch import Read
from kvkeep.errors import UsageError
from kvkeep.memory.meter import Memory
from kvkeep.policies.names import STOCK
from kvkeep.stock import memory_of, new_cache
from kvkeep_lab.limits import entry_bytes
from kvkeep_lab.partial import INTERRUPTED, Interruption, reason

WARM_UP = 6
"""Steps before those that are timed, if a graph of CUDA may run them: those before it is captured, and the capture."""
NAIVE = "naive"
"""Without a cache: the complete sequence is computed again for every token."""

SAME_ENTRIES = "stock, the budget's entries"

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
""""wall": elapsed seconds. "processor": seconds of work of all threads of this process, which excludes waiting, other
processes and a GPU."""


Timer = Callable[[Tensor, int], tuple[float, list[float]]]
"""Called with the ids of a prompt, (batch, tokens), and a number of steps. Returns the seconds of the prompt and of
each later step, without the first step, which warms up."""


@dataclass(frozen=True)
class TimingCase:
    """One cache at one context: a prompt, then single steps."""

    label: str
    length: int
    """Tokens of the prompt."""
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    rival: str = STOCK
    """Label of the case that it is compared with."""
    reads: int | None = None
    """Tokens that are read if not ``length``: for a stock cache with a budget's entries."""
    batch: int = 1
    """Number of rows."""
    by: Timer | None = None
    """Measures the seconds if another engine runs the model."""


@dataclass(frozen=True)
class Timed:
    """The figures of one case. Seconds are medians. Ratios are relative to the rival at the same context (below 1 is
    faster)."""

    label: str
    context: int
    prefill_s: float | None
    step_ms: float | None
    slowest_ms: float | None
    """Milliseconds of the slowest step."""
    mean_ms: float | None
    """Mean milliseconds of all steps, for methods that work once for many steps."""
    merging_ms: float | None
    """Milliseconds of the mean that merging takes by the wall clock (on a GPU, to launch it)."""
    prefill_ratio: float | None
    step_ratio: float | None
    held_ratio: float | None
    """Ratio of the step to a stock cache with only the budget's entries."""
    steps: int
    memory: dict[str, Any]
    """Bytes that the cache reports. On a GPU ``device_peak_bytes`` is the allocator's peak during the case beyond the
    bytes before it, including activations."""
    error: str = ""
    entry_bytes: int | None = None
    """Bytes of keys and values that attention reads in a step; None without a cache, and for other engines, which do
    not report them."""
    prefills_s: list[float] = field(default_factory=list)
    """All measured seconds of prompts, in the order of rounds."""
    steps_ms: list[float] = field(default_factory=list)
    """All measured milliseconds of steps, in the order of rounds."""

    @property
    def held_bytes(self) -> int:
        """Bytes of entries that attention reads, in full or compressed."""
        return int(self.memory["resident_bytes"] + self.memory["compressed_bytes"])


_Figures = tuple[float | None, float | None, float | None, float | None]


@dataclass
class _Taken:
    """The samples of one case, in seconds."""

    prefills: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    merging: float = 0.0
    memory: dict[str, Any] = field(default_factory=lambda: asdict(Memory()))
    error: str = ""
    entry_bytes: int | None = None

    @property
    def medians(self) -> tuple[float | None, float | None]:
        """Return the median seconds of prompts and of steps."""
        return median(self.prefills) if self.prefills else None, median(self.steps) if self.steps else None


def run(
    model: Any,
    listed: Sequence[TimingCase],
    *,
    rounds: int = 3,
    steps: int = 16,
    patience_s: float = 20.0,
    clock: str = "wall",
    progress: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> list[Timed]:
    """Measure every case ``rounds`` times, interleaved. In a round, a case has ``steps`` steps, or fewer (at least one)
    after they have taken ``patience_s`` seconds. A case whose prompts and steps have taken four times ``patience_s`` in
    total skips later rounds. clock: one of :data:`CLOCKS`.

    Raises UsageError for the clock "processor" with a model on a GPU. An interrupt raises :class:`Interruption` with
    the rows.
    """
    if clock != "wall" and next(model.parameters()).device.type != "cpu":
        raise UsageError("The processor clock cannot time a GPU; leave out --clock, or give --device cpu.")
    taken = [_Taken() for _ in listed]
    turns = [(turn, number) for turn in range(rounds) for number in range(len(listed))]
    try:
        for done, (turn, number) in enumerate(turns):
            case, samples = listed[number], taken[number]
            progress(f"{case.label} at {case.length}", done, len(turns))
            if samples.error or (turn and sum(samples.prefills) + sum(samples.steps) > 4 * patience_s):
                continue
            try:
                _measure(model, case, samples, steps, patience_s, CLOCKS[clock])
            except Exception as error:
                samples.error = reason(error)
    except KeyboardInterrupt:
        for samples in taken:
            samples.error = samples.error or ("" if samples.steps else INTERRUPTED)
        raise Interruption(_rows(listed, taken)) from None
    return _rows(listed, taken)


def _rows(listed: Sequence[TimingCase], taken: Sequence[_Taken]) -> list[Timed]:
    def ratio(mine: float | None, rival: float | None) -> float | None:
        return mine / rival if mine and rival else None

    places = {(case.label, case.length): samples for case, samples in zip(listed, taken, strict=True)}
    rows = []
    for case, samples in zip(listed, taken, strict=True):
        (prefill, step), ms = samples.medians, [1e3 * seconds for seconds in samples.steps]
        rival, same_entries = (
            places.get((label, case.length), _Taken()).medians for label in (case.rival, SAME_ENTRIES)
        )
        figures: _Figures = (None, None, None, None)
        if ms:
            figures = median(ms), max(ms), fmean(ms), 1e3 * samples.merging / len(ms)
        ratios = ratio(prefill, rival[0]), ratio(step, rival[1]), ratio(step, same_entries[1])
        rest: dict[str, Any] = {"error": samples.error, "entry_bytes": samples.entry_bytes}
        rest |= {"prefills_s": samples.prefills, "steps_ms": ms}
        rows.append(Timed(case.label, case.length, prefill, *figures, *ratios, len(ms), samples.memory, **rest))
    return rows


@torch.no_grad()  # like transformers' generate
def _measure(
    model: Any, case: TimingCase, samples: _Taken, steps: int, patience_s: float, clock: Callable[[], float]
) -> None:
    """Append the seconds of a prompt, of steps and of merging to ``samples``, and set ``memory`` to the bytes of the
    cache."""
    peak = _peak_from_here(next(model.parameters()).device)
    ids = random_ids(model, case.length + steps, case.batch)
    if case.method == NAIVE:
        samples.steps += _until(steps, patience_s, lambda step: timed(model, ids[:, : case.length + step], None, clock))
        samples.memory = asdict(Memory()) | peak()
        return
    if case.by is not None:
        prefill, seconds = case.by(ids[:, : case.length], steps - 1)
        samples.prefills.append(prefill)
        samples.steps += seconds
        return
    cache = new_cache(model, case.method, **case.options)
    prefill = timed(model, ids[:, : case.reads or case.length], cache, clock)
    warm_up = 1 if graph_for(cache, len(ids)) is None else WARM_UP
    for _ in range(warm_up):
        timed(model, ids[:, :1], cache)
    meter = cache.meter if isinstance(cache, KeepCache) else None
    before = meter.merging_s if meter else 0.0
    seconds = _until(steps - 1, patience_s, lambda step: timed(model, ids[:, step : step + 1], cache, clock))
    samples.prefills.append(prefill)
    samples.steps += seconds
    samples.merging += meter.merging_s - before if meter else 0.0
    samples.memory = asdict(memory_of(cache)) | peak()
    samples.entry_bytes = entry_bytes(cache, (case.reads or case.length) + warm_up + len(seconds), case.batch)


def _until(steps: int, patience_s: float, measure: Callable[[int], float]) -> list[float]:
    seconds: list[float] = []
    for step in range(steps):
        if seconds and sum(seconds) > patience_s:
            break
        seconds.append(measure(step))
    return seconds


def _peak_from_here(device: torch.device) -> Callable[[], dict[str, int]]:
    """Return a function that returns a GPU's peak of allocated memory from this call on; on a CPU it returns an empty
    dict."""
    if device.type != "cuda":
        return dict
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    return lambda: {"device_peak_bytes": torch.cuda.max_memory_allocated(device) - before}


def random_ids(model: Any, length: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Return random token ids, (batch, length), on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def timed(model: Any, ids: Tensor, cache: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds by ``clock`` of a pass over ``ids`` (batch, tokens), including its last logits."""
    token = None if graph_for(cache, ids.numel()) is None else ids[0].tolist()
    synchronize(ids.device)  # excludes the device's earlier work
    start = clock()
    if token is None:
        logits: Tensor | Exception = model(ids, cache=cache, use_cache=cache is not None, logits_to_keep=1).logits[0]
    else:
        logits = forward_one(model, Read(cache, token))
    if isinstance(logits, Exception):
        raise logits
    logits[-1, 0].item()  # waits for the device
    return clock() - start


def synchronize(device: torch.device) -> None:
    """Wait for ``device`` if it works asynchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
