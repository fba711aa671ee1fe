"""Prefill and decoding of many caches, timed in one run.

Timings on a shared machine wander, so cases are interleaved over several rounds and the figures are medians and
ratios to the stock cache of the same run. Token ids are random: the time a step takes does not depend on them.
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
from kvkeep.errors import UsageError
from kvkeep.memory.meter import Memory
from kvkeep.stock import STOCK, memory_of, new_cache
from kvkeep_lab.limits import entry_bytes
from kvkeep_lab.partial import INTERRUPTED, Interruption, reason

NAIVE = "naive"
"""No cache: the whole sequence is computed again for every token."""

SAME_ENTRIES = "stock, the budget's entries"

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
"""Seconds that pass, and those in which this process's threads work, together: what a pass costs where others use
the machine, too, but without waiting, and without a GPU."""


Timer = Callable[[Tensor, int], tuple[float, list[float]]]
"""Gets the ids of a prompt, (batch, tokens), and a number of steps; returns the seconds of the prompt and of each step
after it, the first of all left out: it warms up."""


@dataclass(frozen=True)
class TimingCase:
    """One cache at one context: ``length`` prompt tokens, then single steps. ``rival``: whom it is compared with.
    ``reads``: prompt tokens where these are not ``length``: a stock cache of a budget's entries. ``batch``: rows.
    ``by``: who takes the seconds, where another engine runs the model."""

    label: str
    length: int
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    rival: str = STOCK
    reads: int | None = None
    batch: int = 1
    by: Timer | None = None


@dataclass(frozen=True)
class Timed:
    """What one case measured. Seconds are medians; ratios are to the rival of the same context (below 1 is faster);
    ``held_ratio``: of the step, to a stock cache with the budget's entries only. ``slowest_ms``, ``mean_ms``: the
    slowest step, and the mean of all, for methods that do their work once for many; ``merging_ms``: how much of that
    mean is merging, by the wall clock (on a GPU, asking for it). ``memory``: the cache's own account; on a GPU also
    ``device_peak_bytes``, the most its allocator had given out during the case beyond what it had before, the model's
    activations included. ``entry_bytes``: of keys and values that attention reads in a step; None without a cache, and
    for other engines, which do not say what they hold. ``prefills_s`` and ``steps_ms``: all that was taken, in order,
    round by round."""

    label: str
    context: int
    prefill_s: float | None
    step_ms: float | None
    slowest_ms: float | None
    mean_ms: float | None
    merging_ms: float | None
    prefill_ratio: float | None
    step_ratio: float | None
    held_ratio: float | None
    steps: int
    memory: dict[str, Any]
    error: str = ""
    entry_bytes: int | None = None
    prefills_s: list[float] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        """Bytes of entries that attention reads, in full or in a smaller form."""
        return int(self.memory["resident_bytes"] + self.memory["compressed_bytes"])


_Figures = tuple[float | None, float | None, float | None, float | None]


@dataclass
class _Taken:
    """What was taken of one case so far, in seconds."""

    prefills: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    merging: float = 0.0
    memory: dict[str, Any] = field(default_factory=lambda: asdict(Memory()))
    error: str = ""
    entry_bytes: int | None = None

    @property
    def medians(self) -> tuple[float | None, float | None]:
        """Of prompts, and of steps."""
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
    """Measure every case ``rounds`` times, interleaved. A case takes ``steps`` steps a round, fewer (one at least) once
    ``patience_s`` seconds have gone into them; one that has used four times that in all sits out later rounds.
    clock: one of :data:`CLOCKS`; raises UsageError for "processor" where the model is on a GPU.

    Raises :class:`Interruption` with the rows, when it is interrupted.
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


@torch.no_grad()  # as transformers' own generate runs
def _measure(
    model: Any, case: TimingCase, samples: _Taken, steps: int, patience_s: float, clock: Callable[[], float]
) -> None:
    """Add the seconds of a prompt, of steps and of merging to ``samples``, and set its ``memory`` to what the cache
    holds."""
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
    timed(model, ids[:, :1], cache)  # the first step warms up
    meter = cache.meter if isinstance(cache, KeepCache) else None
    before = meter.merging_s if meter else 0.0
    seconds = _until(steps - 1, patience_s, lambda step: timed(model, ids[:, step : step + 1], cache, clock))
    samples.prefills.append(prefill)
    samples.steps += seconds
    samples.merging += meter.merging_s - before if meter else 0.0
    samples.memory = asdict(memory_of(cache)) | peak()
    samples.entry_bytes = entry_bytes(cache, (case.reads or case.length) + 1 + len(seconds), case.batch)


def _until(steps: int, patience_s: float, measure: Callable[[int], float]) -> list[float]:
    seconds: list[float] = []
    for step in range(steps):
        if seconds and sum(seconds) > patience_s:
            break
        seconds.append(measure(step))
    return seconds


def _peak_from_here(device: torch.device) -> Callable[[], dict[str, int]]:
    """Return a function of the most memory that a GPU gives out from here on; on a CPU of nothing."""
    if device.type != "cuda":
        return dict
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    return lambda: {"device_peak_bytes": torch.cuda.max_memory_allocated(device) - before}


def random_ids(model: Any, length: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Return token ids by chance, (batch, length), where the model is."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def timed(model: Any, ids: Tensor, cache: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that a pass over ``ids`` (batch, tokens) takes by ``clock``, until its last logits are
    there."""
    synchronize(ids.device)  # what earlier steps left running is not this one's
    start = clock()
    logits = model(ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=1).logits
    logits[0, -1, 0].item()  # waits for the device
    return clock() - start


def synchronize(device: torch.device) -> None:
    """Wait for ``device``, if it is one that has to be waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
