"""``merging-cost``: seconds and peak memory of methods that merge neighbours, compared with other methods."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvkeep.policies.names import STOCK
from kvkeep_lab.figures import FilePath, dress, panels, styled
from kvkeep_lab.reading import takes
from kvkeep_lab.statistics import where
from kvkeep_lab.studies.base import BUDGET, BudgetText, Flag, MethodName, Study, Trial
from kvkeep_lab.tables import Table, megabytes, milliseconds, number, refusals, times
from kvkeep_lab.tasks.base import Metric
from kvkeep_lab.timing import TimingCase, run

OURS, RIVAL = "kvslimmer", "asymkv"


@dataclass(frozen=True)
class RequestCost:
    """One method after a prompt of ``length`` tokens in chunks of ``chunk`` (0: the method's default)."""

    method: str
    length: int
    chunk: int
    prefill_s: float | None = None
    mean_ms: float | None = None
    """Mean milliseconds of all steps, because one merge serves many steps."""
    held_bytes: int = 0
    """Bytes of entries after the last step, with bookkeeping."""
    peak_bytes: int = 0
    """Peak bytes of cache, workspace and bookkeeping; on a GPU, of all allocations."""
    error: str = ""


@dataclass(frozen=True)
class Costs:
    """All measurements."""

    rows: list[RequestCost]
    answer: int
    """Tokens of an answer, for the seconds of a complete request."""

    def of(self, method: str, length: int, chunk: int = 0) -> RequestCost | None:
        """Return a measurement, or None if it is missing."""
        return next(iter(where(self.rows, method=method, length=length, chunk=chunk, error="")), None)

    def seconds(self, row: RequestCost) -> float:
        """Return the seconds of prompt and answer."""
        assert row.prefill_s is not None and row.mean_ms is not None
        return row.prefill_s + self.answer * row.mean_ms / 1e3


class MergingCost(Study):
    """KVSlimmer's Fig. 4 to 6. By default AsymKV is kvkeep's variant, with the gradient of each layer's loss. ``pair``
    can select the authors' versions of both methods."""

    name = "merging-cost"
    about = "measure time and peak memory of kvslimmer, asymkv and others, by length and chunk"
    protocol = (
        "Each method reads random token ids within a budget and then decodes single tokens. Prompts have the "
        "median and steps the mean over all rounds, which are interleaved. A request is the prompt and an answer "
        "of --answer tokens. Peak: the largest sum of entries, workspace and bookkeeping as the cache counts "
        "them (on a GPU, all allocated memory). asymkv's gradient is of each layer's own loss, not a backward "
        "pass through the model, so it is a cheaper rival than the paper's; asymkv-published makes that pass."
    )
    found = Costs
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("seconds", "seconds of a request, kvslimmer less than asymkv, mean over lengths", kind="saving"),
        Metric("seconds_most", "seconds of a request, kvslimmer less than asymkv, the most", kind="saving"),
        Metric("step", "a decoding step, kvslimmer less than asymkv, mean over lengths", kind="saving"),
        Metric("peak_first", "peak memory, kvslimmer less than asymkv, smallest chunk", kind="saving"),
        Metric("peak_last", "peak memory, kvslimmer less than asymkv, largest chunk", kind="saving"),
        Metric("peak_gap", "growth of that share from the smallest chunk to the largest", "higher", "number"),
        Metric("beside", "a decoding step, kvslimmer by streaming-llm, mean over lengths", "lower", "number"),
    )
    certain = ("peak_first", "peak_last", "peak_gap")

    methods: Annotated[list[MethodName], Flag("--methods", "-x")] = Field(
        [OURS, RIVAL, "kvslimmer-exact", "streaming-llm", "quest", STOCK], min_length=1, description="by length"
    )
    lengths: list[Annotated[int, Field(ge=32)]] = Field(
        [512, 1024, 2048], min_length=1, description="prompt lengths in tokens"
    )
    budget: Annotated[BudgetText, Flag("--budget", "-b")] = Field("256", description=BUDGET)
    pair: Annotated[list[MethodName], Field(min_length=2, max_length=2)] | None = Field(
        None, description="the two methods that are compared, for kvslimmer and asymkv"
    )
    chunks: list[Annotated[int, Field(ge=16)]] = Field(
        [32, 64, 128, 256], min_length=1, description="of these two, at the middle length"
    )
    answer: int = Field(
        64, ge=2, description="tokens in the answer of a request, and number of steps that are measured"
    )
    rounds: int = Field(1, ge=1, description="number of rounds; each round measures everything once")

    @property
    def compared(self) -> tuple[str, str]:
        """KVSlimmer and AsymKV, or their substitutes."""
        first, second = self.pair or (OURS, RIVAL)
        return first, second

    @property
    def middle(self) -> int:
        """The length at which chunks are compared."""
        return self.lengths[len(self.lengths) // 2]

    def measure(self, trial: Trial) -> Costs:
        wanted = [(method, length, 0) for length in self.lengths for method in self.methods]
        wanted += [(method, self.middle, chunk) for chunk in self.chunks for method in self.compared]
        listed, steps = [self._case(*one) for one in wanted], self.answer + 1
        rows = run(trial.model, listed, rounds=self.rounds, steps=steps, patience_s=600, progress=trial.progress)
        costs = []
        for one, row in zip(wanted, rows, strict=True):
            memory = row.memory
            held_bytes = row.held_bytes + memory["bookkeeping_bytes"]
            peak = memory["peak_cache_bytes"] + memory["peak_workspace_bytes"] + memory["bookkeeping_bytes"]
            peak = memory.get("device_peak_bytes", peak)
            costs.append(RequestCost(*one, row.prefill_s, row.mean_ms, held_bytes, peak, row.error))
        return Costs(costs, self.answer)

    def _case(self, method: str, length: int, chunk: int) -> TimingCase:
        options: dict[str, Any] = {"budget": self.budget, "context": length + self.answer + 2}
        options = options if "budget" in takes(method) else {}
        return TimingCase(f"{method}, chunk {chunk}", length, method, options | ({"chunk": chunk} if chunk else {}))

    def scores(self, found: Costs) -> dict[str, float]:
        ours, rivals = self.compared
        pairs = [(found.of(ours, length), found.of(rivals, length)) for length in self.lengths]
        seconds = [1 - found.seconds(a) / found.seconds(b) for a, b in pairs if a is not None and b is not None]
        steps = [1 - a.mean_ms / b.mean_ms for a, b in pairs if a and b and a.mean_ms and b.mean_ms]
        scores: dict[str, float] = {}
        if seconds and steps:
            scores |= {"seconds": fmean(seconds), "seconds_most": max(seconds), "step": fmean(steps)}
        for name, chunk in (("peak_first", self.chunks[0]), ("peak_last", self.chunks[-1])):
            mine, rival = (found.of(method, self.middle, chunk) for method in self.compared)
            if mine is not None and rival is not None:
                scores[name] = 1 - mine.peak_bytes / rival.peak_bytes
        if "peak_first" in scores and "peak_last" in scores:
            scores["peak_gap"] = scores["peak_last"] - scores["peak_first"]
        others = [(found.of(ours, length), found.of("streaming-llm", length)) for length in self.lengths]
        if beside := [a.mean_ms / b.mean_ms for a, b in others if a and b and a.mean_ms and b.mean_ms]:
            scores["beside"] = fmean(beside)
        return scores

    def tables(self, found: Costs) -> list[Table]:
        ours, rivals = self.compared
        seconds = Table(
            f"Seconds by length: budget {self.budget}, {found.answer} tokens decoded",
            ["method, tokens", "prompt", "step, mean", "request", f"by {rivals}'s", "held", "peak"],
            notes=refusals((row.method, f"{row.length:,}", row.error) for row in found.rows),
        )
        for row in (row for row in found.rows if not row.chunk and not row.error):
            rival = found.of(rivals, row.length)
            ratio = None if rival is None else found.seconds(row) / found.seconds(rival)
            assert row.prefill_s is not None and row.mean_ms is not None
            timings = [f"{row.prefill_s:.2f} s", milliseconds(row.mean_ms / 1e3), f"{found.seconds(row):.2f} s"]
            sizes = [megabytes(row.held_bytes), megabytes(row.peak_bytes)]
            seconds.rows.append([f"`{row.method}`, {row.length:,}", *timings, times(ratio), *sizes])
        peaks = Table(
            f"Peak memory by chunk, {self.middle:,} tokens",
            ["chunk", f"`{ours}`", f"`{rivals}`", "less"],
            notes=["The paper: of a GPU's whole memory, budget 2,048, 29 % less with chunks of 512, 39 % with 1,024."],
        )
        for chunk in self.chunks:
            mine, rival = (found.of(method, self.middle, chunk) for method in self.compared)
            if mine is not None and rival is not None:
                less = f"{number(100 * (1 - mine.peak_bytes / rival.peak_bytes))} %"
                peaks.rows.append([f"{chunk}", megabytes(mine.peak_bytes), megabytes(rival.peak_bytes), less])
        return [seconds, peaks]

    def draw(self, found: Costs, path: FilePath, *, title: str) -> None:
        titles = (f"seconds of a request of {found.answer}", "ms of a step, mean", f"peak MB, {self.middle:,} tokens")
        with panels(path, f"{title}, budget {self.budget}", 3) as grid:
            for place, method in enumerate(self.methods):
                rows = [row for row in found.rows if row.method == method and not row.error]
                mine, chunked = ([row for row in rows if bool(row.chunk) is by] for by in (False, True))
                lengths, style = [row.length for row in mine], styled(place, method, None)
                grid[0].plot(lengths, [found.seconds(row) for row in mine], **style)
                grid[1].plot(lengths, [row.mean_ms for row in mine], **style)
                if chunked:
                    grid[2].plot([row.chunk for row in chunked], [row.peak_bytes / 1e6 for row in chunked], **style)
            for axes, words, across in zip(grid, titles, ("tokens", "tokens", "chunk"), strict=True):
                dress(axes, words, across, x="log2", y=0, legend=axes is grid[0])
