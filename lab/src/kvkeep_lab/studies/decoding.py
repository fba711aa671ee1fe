"""``decoding``: compares decoding with and without a cache, prefill with decoding, and appending by copies with
preallocation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar

import torch
from pydantic import AfterValidator, Field

from kvkeep.geometry import ModelGeometry
from kvkeep.policies.names import STOCK
from kvkeep.stock import new_cache
from kvkeep_lab.figures import COLOURS, FilePath, dress, panels, styled
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import Count, MethodName, Study, Trial
from kvkeep_lab.tables import Table, milliseconds, number, times
from kvkeep_lab.tasks.base import Metric
from kvkeep_lab.timing import NAIVE, TimingCase, random_ids, run, synchronize, timed

GROWING = (STOCK, "full", "static")
"""Caches that append by copying all entries, into blocks, and into preallocated memory."""

_APPENDS = 8


@dataclass(frozen=True)
class DecodingRun:
    """One decoding of the complete length."""

    way: str
    first_s: float
    """Seconds to the first token."""
    step_ms: list[float]
    """Minimum milliseconds of each later token over all rounds."""

    @property
    def total_s(self) -> float:
        """Seconds of all tokens."""
        return self.first_s + sum(self.step_ms) / 1e3


@dataclass(frozen=True)
class DecodingPhase:
    """The times of a prompt of ``length`` tokens and of a step after it."""

    length: int
    prefill_s: float
    """Seconds of the prompt."""
    step_ms: float
    """Milliseconds of a step with the stock cache."""
    naive_ms: float
    """Milliseconds of a step without a cache."""


@dataclass(frozen=True)
class Append:
    """Microseconds to append a token's keys and values in all layers after ``length`` tokens, without computing
    them."""

    way: str
    length: int
    microseconds: float


@dataclass(frozen=True)
class Decoded:
    """All measurements."""

    prompt: int
    runs: list[DecodingRun]
    phases: list[DecodingPhase]
    appends: list[Append]

    def run(self, way: str) -> DecodingRun:
        return where(self.runs, way=way)[0]


class Decoding(Study):
    """The claims about latency in sections 11 to 13 of the tutorial, measured."""

    name = "decoding"
    about = "compare naive with cached decoding, prefill with decoding, and appending with preallocation"
    protocol = (
        "The text is random token ids. Decoding: single tokens after a prompt, without a cache (the whole text "
        "is processed again for each token) and with several caches. The time of a step is its fastest over all "
        "rounds, which are interleaved. Phases: medians, by length of the prompt. Appending: the keys and values "
        "of one token are written into every layer of a cache, without any computation. The stock cache copies "
        "everything, 'full' grows by blocks, and 'static' is preallocated."
    )
    found = Decoded
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("naive_growth", "ms of the last naive step, by those of the first", "lower", "number"),
        Metric("cached_growth", "ms of the last cached step, by those of the first", "lower", "number"),
        Metric("growth", "growth of a cached step by that of a naive one", "lower", "number"),
        Metric("total", "seconds in all, naive by cached", "lower", "number"),
        Metric("phases", "tokens a second, prefill by decode, at the longest prompt", "higher", "number"),
        Metric("append", "ms to append a token, copying by preallocated, at the longest", "lower", "number"),
    )

    prompt: int = Field(64, ge=1, description="prompt tokens before the first step")
    new: int = Field(192, ge=8, description="tokens written")
    caches: Annotated[list[MethodName], AfterValidator(lambda names: list(dict.fromkeys((STOCK, *names))))] = Field(
        [STOCK, "full", "static", "paged"], description="caches to measure; stock has to be one of them"
    )
    lengths: list[Count] = Field(
        [64, 128, 256, 512, 1024, 2048],
        min_length=1,
        description="prompt lengths in tokens, for the phases and for appending",
    )
    rounds: int = Field(2, ge=1, description="number of rounds; each round measures everything once")

    def measure(self, trial: Trial) -> Decoded:
        ways = (NAIVE, *self.caches)
        total = self.rounds * len(ways) + 2
        runs: dict[str, list[list[float]]] = {way: [] for way in ways}
        for turn in range(self.rounds):
            for place, way in enumerate(ways):
                trial.progress(way, turn * len(ways) + place, total)
                runs[way].append(self._run(trial.model, way, trial.seed or 0))
        best = {way: [min(step) for step in zip(*rounds, strict=True)] for way, rounds in runs.items()}
        decoded = [DecodingRun(way, first, [1e3 * step for step in steps]) for way, (first, *steps) in best.items()]
        trial.progress("prefill and decode", total - 2, total)
        phases = self._phases(trial.model)
        trial.progress("appending", total - 1, total)
        appends = [one for way in GROWING for one in self._appends(trial.model, way)]
        return Decoded(self.prompt, decoded, phases, appends)

    @torch.inference_mode()
    def _run(self, model: Any, way: str, seed: int) -> list[float]:
        """Return the seconds of every token. The first token's include the prompt."""
        length = self.prompt + self.new
        ids = random_ids(model, length, seed=seed)
        if way == NAIVE:
            return [timed(model, ids[:, :stop], None) for stop in range(self.prompt, length)]
        cache = _cache(model, way, length)
        first = timed(model, ids[:, : self.prompt], cache)
        return [first, *(timed(model, ids[:, at : at + 1], cache) for at in range(self.prompt, length - 1))]

    def _phases(self, model: Any) -> list[DecodingPhase]:
        listed = [TimingCase(way, length, way) for length in self.lengths for way in (STOCK, NAIVE)]
        rows = {(row.context, row.label): row for row in run(model, listed, rounds=self.rounds, steps=6)}
        phases = []
        for length in self.lengths:
            stock, naive = rows[length, STOCK], rows[length, NAIVE]
            assert stock.prefill_s is not None and stock.step_ms is not None and naive.step_ms is not None
            phases.append(DecodingPhase(length, stock.prefill_s, stock.step_ms, naive.step_ms))
        return phases

    @torch.inference_mode()
    def _appends(self, model: Any, way: str) -> list[Append]:
        geometry = ModelGeometry.from_config(model.config)
        owners = [layer for layer in geometry.layers if layer.owns_entries]

        def append(cache: Any, count: int) -> float:
            sizes = [(layer.kv_heads, count, dim) for layer in owners for dim in (layer.key_dim, layer.value_dim)]
            entries = iter([torch.zeros(1, *size, device=model.device, dtype=model.dtype) for size in sizes])
            start = time.perf_counter()
            for layer in owners:
                cache.layers[layer.index].update(next(entries), next(entries))
            synchronize(model.device)
            return time.perf_counter() - start

        found = []
        for length in self.lengths:
            cache = _cache(model, way, length + _APPENDS * self.rounds)
            append(cache, length)
            found.append(Append(way, length, 1e6 * min(append(cache, 1) for _ in range(_APPENDS * self.rounds))))
        return found

    def scores(self, found: Decoded) -> dict[str, float]:
        naive, stock, longest = found.run(NAIVE), found.run(STOCK), found.phases[-1]
        appends = {one.way: one.microseconds for one in found.appends if one.length == self.lengths[-1]}
        bare, cached = (last / first for first, last in (_ends(naive), _ends(stock)))
        return {
            "naive_growth": bare,
            "cached_growth": cached,
            "growth": cached / bare,
            "total": naive.total_s / stock.total_s,
            "phases": longest.length / longest.prefill_s * longest.step_ms / 1e3,
            "append": appends[STOCK] / appends["static"],
        }

    def tables(self, found: Decoded) -> list[Table]:
        stock = found.run(STOCK)
        times_table = Table(
            f"{len(stock.step_ms) + 1} tokens after {found.prompt}",
            ["", "first token", "early steps, mean of 8", "last steps, mean of 8", "in all", "by stock's"],
        )
        for one in found.runs:
            first, last = (milliseconds(step / 1e3) for step in _ends(one))
            total = [f"{one.total_s:.2f} s", times(one.total_s / stock.total_s)]
            times_table.rows.append([f"`{one.way}`", f"{one.first_s:.3f} s", first, last, *total])
        phases = Table(
            "Prefill and decode apart",
            ["tokens", "prefill", "tokens/s", "a cached step", "tokens/s", "a naive step", "naive by cached"],
        )
        for phase in found.phases:
            prefill = [f"{phase.length:,}", f"{phase.prefill_s:.3f} s", number(phase.length / phase.prefill_s)]
            step, naive = (milliseconds(ms / 1e3) for ms in (phase.step_ms, phase.naive_ms))
            phases.rows.append(
                [*prefill, step, number(1e3 / phase.step_ms), naive, times(phase.naive_ms / phase.step_ms)]
            )
        ways = each(found.appends, "way")
        appends = Table("µs to append one token to all layers", ["tokens held", *ways])
        by_place = {(one.length, one.way): one.microseconds for one in found.appends}
        for length in each(found.appends, "length"):
            appends.rows.append([f"{length:,}", *(number(by_place[length, way]) for way in ways)])
        return [times_table, phases, appends]

    def draw(self, found: Decoded, path: FilePath, *, title: str) -> None:
        with panels(path, title, 3) as (steps, sums, appends):
            for place, one in enumerate(found.runs):
                style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "linewidth": 1.2}
                across = range(found.prompt + 1, found.prompt + 1 + len(one.step_ms))
                steps.plot(across, one.step_ms, label=one.way, **style)
                sums.plot(across, list(accumulate((ms / 1e3 for ms in one.step_ms), initial=one.first_s))[1:], **style)
            for place, way in enumerate(each(found.appends, "way"), start=1):
                mine = where(found.appends, way=way)
                appends.plot([one.length for one in mine], [one.microseconds for one in mine], **styled(place, way))
            dress(steps, "ms of a step", "tokens", y="log", legend=True)
            dress(sums, "seconds until then", "tokens")
            dress(appends, "µs to append a token", "tokens", x="log2", y="log", legend=True)


def _cache(model: Any, way: str, length: int) -> Any:
    return new_cache(model, way, **({"budget": length + 1} if way == "static" else {}))


def _ends(one: DecodingRun) -> tuple[float, float]:
    """Return the mean milliseconds of the first and the last eight steps, without the very first step."""
    ends = one.step_ms[1:9], one.step_ms[-8:]
    return tuple(sum(steps) / len(steps) for steps in ends)  # type: ignore[return-value]
