"""Speed and memory of every cache, compared in one run with transformers' own on the same model.

Timings on a shared machine wander, so cases are interleaved over several rounds and the figures are medians and
ratios to the stock cache of the same run. Token ids are random: the time a step takes does not depend on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.cache import STOCK, KeepCache, memory_of, new_cache
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.merging import MERGING
from kvkeep.policies.methods import METHODS
from kvkeep.policies.selectors import SELECTORS
from kvkeep.stores.meter import Memory, Meter

NAIVE = "naive"
HELD = "stock, the budget's entries"
INTERRUPTED = "interrupted before it was measured"

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
"""Seconds that pass, and those in which this process's threads work, together: these tell what a pass costs where
others use the machine, too, but nothing of waiting, nor of a GPU."""


@dataclass(frozen=True)
class Case:
    """One cache at one context: ``length`` prompt tokens, then single steps. ``rival``: whom it is compared with.
    ``reads``: prompt tokens where these are not ``length``: a stock cache of a budget's entries. ``batch``: rows."""

    label: str
    length: int
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    rival: str = STOCK
    reads: int | None = None
    batch: int = 1


@dataclass(frozen=True)
class Row:
    """What one case measured. Seconds are medians; ratios are to the rival of the same context (below 1 is faster);
    ``held_ratio``: of the step, to a stock cache with the budget's entries only. ``slowest_ms``, ``mean_ms``: the
    slowest step, and the mean of all, for methods that do their work once for many; ``merging_ms``: how much of that
    mean is merging, by the wall clock (on a GPU, asking for it). ``memory``: the cache's own account; on a GPU also
    ``device_peak_bytes``, the most its allocator had given out during the case beyond what it had before, the model's
    activations included."""

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


SHRINKING = (
    *(name for name in METHODS if name in SELECTORS),
    *("quantized:8", "quantized:4", "quantized:2", "lowrank:32", "longcache", "h2o+quantize:4", "revive"),
    *(*MERGING, "h2o+merge", "cam"),
    *("kvreviver", "kvreviver:estimate=shrunk,by=mean"),
)
"""Methods that drop entries, keep them smaller or merge them."""


def cases(model: Any, contexts: Sequence[int], budget: str, steps: int, *, slow: bool = True) -> list[Case]:
    """Return the cases of a whole run: no cache, the stock cache, the exact caches, kv-direct in each kind and place,
    kv-direct with a budget of the whole context, where nothing is recalled: its own overhead; every method that drops
    or shrinks, and beside them a stock cache that holds the budget's entries only."""
    geometry = ModelGeometry.from_config(model.config, next(model.parameters()).dtype.itemsize)
    entries = {length: Budget.parse(budget).entries(geometry, context=length) for length in contexts}
    listed = []
    for length in contexts:

        def direct(kind: str, where: str, length: int = length) -> Case:
            options = {"budget": budget, "checkpoint": kind, "where": where, "context": length}
            return Case(f"kv-direct {kind}@{where}", length, "kv-direct", options)

        listed += [
            Case(STOCK, length, STOCK),
            Case("full", length, "full"),
            Case("static", length, "static", {"budget": length + steps + 1}),
            Case("paged", length, "paged"),
            Case("kv-direct, no recall", length, "kv-direct", {"budget": length + steps + 1}),
            *(direct("kv", where) for where in ("device", "host", "disk")),
            *(direct("residual", where) for where in ("device", "host", "disk")),
        ]
        listed += [Case(name, length, name, {"budget": budget, "context": length}) for name in SHRINKING]
        if entries[length]:
            listed.append(Case(HELD, length, STOCK, reads=entries[length]))
        if slow:
            listed += [Case(NAIVE, length, NAIVE), direct("residual:4", "host"), direct("tokens", "device")]
    return listed


def run(
    model: Any,
    listed: Sequence[Case],
    *,
    rounds: int = 3,
    steps: int = 16,
    patience_s: float = 20.0,
    clock: str = "wall",
    progress: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> list[Row]:
    """Measure every case ``rounds`` times, interleaved. A case takes ``steps`` steps a round, fewer (one at least) once
    ``patience_s`` seconds have gone into them; one that has used four times that in all sits out later rounds.
    clock: one of :data:`CLOCKS`; raises UsageError for "processor" where the model is on a GPU.

    An interrupt ends the run, and what was measured until then is returned.
    """
    if clock != "wall" and next(model.parameters()).device.type != "cpu":
        raise UsageError("Processor seconds say nothing of a GPU; leave out the clock, or give --device cpu.")
    prefills: dict[int, list[float]] = {number: [] for number in range(len(listed))}
    times: dict[int, list[float]] = {number: [] for number in range(len(listed))}
    merging: dict[int, float] = dict.fromkeys(range(len(listed)), 0.0)
    memories: dict[int, dict[str, Any]] = {}
    errors: dict[int, str] = {}
    turns = [(turn, number) for turn in range(rounds) for number in range(len(listed))]
    for done, (turn, number) in enumerate(turns):
        case = listed[number]
        progress(f"{case.label} at {case.length}", done, len(turns))
        if number in errors or (turn and sum(prefills[number]) + sum(times[number]) > 4 * patience_s):
            continue
        try:
            prefill, took, merged, memories[number] = _measure(model, case, steps, patience_s, CLOCKS[clock])
        except KvkeepError as error:
            errors[number] = str(error)
            continue
        except KeyboardInterrupt:
            errors |= {missing: INTERRUPTED for missing in range(len(listed)) if not times[missing]}
            break
        prefills[number] += prefill
        times[number] += took
        merging[number] += merged
    return list(_rows(listed, prefills, times, merging, memories, errors))


def _rows(
    listed: Sequence[Case],
    prefills: dict[int, list[float]],
    times: dict[int, list[float]],
    merging: dict[int, float],
    memories: dict[int, dict[str, Any]],
    errors: dict[int, str],
) -> Iterator[Row]:
    def middle(values: list[float]) -> float | None:
        return median(values) if values else None

    def ratio(mine: float | None, rival: float | None) -> float | None:
        return mine / rival if mine and rival else None

    places = {(case.label, case.length): number for number, case in enumerate(listed)}
    for number, case in enumerate(listed):
        rival, held = places.get((case.rival, case.length)), places.get((HELD, case.length))
        prefill, step = middle(prefills[number]), middle(times[number])
        yield Row(
            case.label,
            case.length,
            prefill,
            None if step is None else 1e3 * step,
            1e3 * max(times[number]) if times[number] else None,
            1e3 * fmean(times[number]) if times[number] else None,
            1e3 * merging[number] / len(times[number]) if times[number] else None,
            None if rival is None else ratio(prefill, middle(prefills[rival])),
            None if rival is None else ratio(step, middle(times[rival])),
            None if held is None else ratio(step, middle(times[held])),
            len(times[number]),
            memories.get(number, asdict(Memory())),
            errors.get(number, ""),
        )


@torch.inference_mode()
def _measure(
    model: Any, case: Case, steps: int, patience_s: float, clock: Callable[[], float]
) -> tuple[list[float], list[float], float, dict[str, Any]]:
    """Return the seconds of prompts, of steps, of merging in all steps, and what the cache holds in the end."""
    device = next(model.parameters()).device
    peak = _peak_from_here(device)
    generator = torch.Generator().manual_seed(0)
    shape = case.batch, case.length + steps
    ids = torch.randint(0, model.config.vocab_size, shape, generator=generator).to(device)
    if case.method == NAIVE:
        took = _until(steps, patience_s, lambda step: timed(model, ids[:, : case.length + step], None, clock))
        return [], took, 0.0, asdict(Memory()) | peak()
    cache = new_cache(model, case.method, **case.options)
    prefill = timed(model, ids[:, : case.reads or case.length], cache, clock)
    timed(model, ids[:, :1], cache)  # the first step warms up
    meter = cache.meter if isinstance(cache, KeepCache) else Meter()
    before = meter.merging_s
    took = _until(steps - 1, patience_s, lambda step: timed(model, ids[:, step : step + 1], cache, clock))
    return [prefill], took, meter.merging_s - before, asdict(memory_of(cache)) | peak()


def _until(steps: int, patience_s: float, measure: Callable[[int], float]) -> list[float]:
    took: list[float] = []
    for step in range(steps):
        if took and sum(took) > patience_s:
            break
        took.append(measure(step))
    return took


def _peak_from_here(device: torch.device) -> Callable[[], dict[str, int]]:
    """Return what tells how much memory a GPU will have given out at most from now on; on a CPU it tells nothing."""
    if device.type != "cuda":
        return dict
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    return lambda: {"device_peak_bytes": torch.cuda.max_memory_allocated(device) - before}


def timed(model: Any, ids: Tensor, cache: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that a pass over ``ids`` (batch, tokens) takes by ``clock``, until its last logits are
    there."""
    if ids.device.type == "cuda":
        torch.cuda.synchronize(ids.device)  # what earlier steps left running is not this one's
    start = clock()
    logits = model(ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=1).logits
    logits[0, -1, 0].item()  # waits for the device
    return clock() - start
