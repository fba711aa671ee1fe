"""``throughput``: tokens per second and bytes, by number of rows of a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import Field

from kvkeep.policies.names import STOCK
from kvkeep_lab.figures import FilePath, dress, panels, styled
from kvkeep_lab.reading import takes
from kvkeep_lab.statistics import where
from kvkeep_lab.studies.base import BUDGET, BudgetText, Count, Flag, MethodName, Trial
from kvkeep_lab.studies.engines import EngineStudy
from kvkeep_lab.tables import Table, megabytes, number, refusals, times
from kvkeep_lab.tasks.base import Metric
from kvkeep_lab.timing import TimingCase, run

FULL, REVIVER = STOCK, "kvreviver"
PAPER = {(1, REVIVER): 6.48, (2, REVIVER): 10.16, (8, REVIVER): 19.10, (16, REVIVER): 22.46}
PAPER |= {(1, FULL): 12.67, (2, FULL): 21.48}
"""KVReviver's Table 1: tokens per second (Llama-2-7B, one A100)."""

FITS = 8
"""Ratio of the rows at a budget of 10 % to those of the full cache, in the paper's memory."""


@dataclass(frozen=True)
class Rate:
    """One method with ``batch`` rows."""

    batch: int
    method: str
    prefill_s: float | None = None
    step_ms: float | None = None
    held_bytes: int = 0
    """Bytes of entries that attention reads, in full or compressed, after the last step; 0 for engines by others, which
    do not report them."""
    error: str = ""
    """Reason of missing measurements."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all rows during decoding; nan without measurements."""
        return 1e3 * self.batch / (self.step_ms or math.nan)


@dataclass(frozen=True)
class Rates:
    """All measurements."""

    rows: list[Rate]
    notes: list[str] = field(default_factory=list)
    """Notes on engines by others."""

    def of(self, batch: int, method: str) -> Rate | None:
        """Return the measurements of a method with ``batch`` rows; None if they are missing."""
        return next((row for row in where(self.rows, batch=batch, method=method) if row.step_ms is not None), None)

    def ratio(self, batch: int, method: str, rival_batch: int | None = None) -> float | None:
        """Return a method's tokens per second relative to the stock cache's with ``rival_batch`` rows (None: the same
        number of rows)."""
        mine, full = self.of(batch, method), self.of(rival_batch or batch, FULL)
        return None if mine is None or full is None else mine.tokens_per_s / full.tokens_per_s


class Throughput(EngineStudy):
    """KVReviver's Table 1, and other methods within the same bytes."""

    name = "throughput"
    about = "compare tokens per second of transformers' own cache with methods within a budget, by batch size"
    protocol = (
        "Each method reads a batch of rows of random token ids, all of the same length, and then decodes one "
        "token for each row in a step. Figures are medians over interleaved rounds. Tokens per second count "
        "decoding only. Rows that fit: the number of rows of a method that take as many bytes as one row of "
        "transformers' own cache (stock)."
    )
    found = Rates
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("full_1", "tokens/s, stock, batch 1", "higher", "number"),
        Metric("reviver_1", "tokens/s, kvreviver, batch 1", "higher", "number"),
        Metric("ratio_1", "kvreviver by stock, batch 1", "higher", "number"),
        Metric("ratio_2", "kvreviver by stock, batch 2", "higher", "number"),
        Metric("fits", "rows of kvreviver in the bytes of a stock one", "higher", "number"),
        Metric("best", f"kvreviver by stock, most rows of each, {FITS} times as many", "higher", "number"),
    )
    certain = ("fits",)

    methods: Annotated[list[MethodName], Flag("--methods", "-x")] = Field(
        [FULL, REVIVER, "h2o", "h2o+quantize:4"], min_length=1, description="cache methods to measure"
    )
    batches: list[Count] = Field([1, 2, 8, 16], min_length=1, description="rows")
    budget: Annotated[BudgetText, Flag("--budget", "-b")] = Field("10%", description=BUDGET)
    length: int = Field(512, ge=32, description="prompt tokens of each row")
    steps: int = Field(12, ge=2, description="tokens generated in each round")
    rounds: int = Field(2, ge=1, description="number of rounds; each round measures everything once")

    def measure(self, trial: Trial) -> Rates:
        pairs = [(batch, method) for batch in self.batches for method in self.methods]
        options = {"budget": self.budget, "context": self.length + self.steps + 1}
        cases = [
            TimingCase(
                f"{method}, {batch} rows",
                self.length,
                method,
                options if "budget" in takes(method) else {},
                batch=batch,
            )
            for batch, method in pairs
        ]
        with self.engines(trial, self.length + self.steps, max(self.batches)) as (engines, notes):
            for batch in self.batches:
                theirs = [case for engine in engines for case in engine.cases(self.length, batch)]
                cases += theirs
                pairs += [(batch, case.label) for case in theirs]
            rows = run(trial.model, cases, rounds=self.rounds, steps=self.steps, progress=trial.progress)
        rates = [
            Rate(*pair, row.prefill_s, row.step_ms, row.held_bytes, row.error)
            for pair, row in zip(pairs, rows, strict=True)
        ]
        return Rates(rates, notes)

    def scores(self, found: Rates) -> dict[str, float]:
        largest, scores = max(self.batches), dict[str, float | None]()
        if 1 in self.batches and (full := found.of(1, FULL)) and (mine := found.of(1, REVIVER)):
            scores |= {"full_1": full.tokens_per_s, "reviver_1": mine.tokens_per_s}
            scores |= {"fits": full.held_bytes / mine.held_bytes}
        scores |= {f"ratio_{batch}": found.ratio(batch, REVIVER) for batch in (1, 2) if batch in self.batches}
        scores |= {"best": found.ratio(largest, REVIVER, largest // FITS) if largest >= FITS else None}
        return {name: value for name, value in scores.items() if value is not None}

    def tables(self, found: Rates) -> list[Table]:
        """Return an extended Table 1."""
        one = found.of(1, FULL)
        table = Table(
            f"{self.length} tokens a row, budget {self.budget}",
            [
                "method, rows",
                "prefill",
                "step",
                "tokens/s",
                "by stock",
                "held",
                "rows that fit",
                "the paper's tokens/s",
            ],
            notes=[
                *found.notes,
                *refusals(((row.method, row.batch, row.error) for row in found.rows), "with {} rows"),
            ],
        )
        for row in (row for row in found.rows if not row.error):
            fits = "-" if one is None or not row.held_bytes else f"{one.held_bytes * row.batch / row.held_bytes:.1f}"
            paper = PAPER.get((row.batch, row.method))
            timings = [f"{row.prefill_s:.2f} s", f"{row.step_ms:.0f} ms", number(row.tokens_per_s)]
            sizes = [megabytes(row.held_bytes or None), fits, "" if paper is None else f"{paper:.2f}"]
            table.rows.append(
                [f"`{row.method}`, {row.batch}", *timings, times(found.ratio(row.batch, row.method)), *sizes]
            )
        return [table]

    def draw(self, found: Rates, path: FilePath, *, title: str) -> None:
        with panels(path, f"{title}, budget {self.budget}", 2, 4.2, sharey=True) as (rows, memory_axes):
            for place, method in enumerate(self.methods):
                mine = [row for row in found.rows if row.method == method and not row.error]
                rates, style = [row.tokens_per_s for row in mine], styled(place, method, None)
                if mine:
                    rows.plot([row.batch for row in mine], rates, **style)
                    memory_axes.plot([row.held_bytes / 1e6 for row in mine], rates, **style)
            dress(rows, "tokens a second, all rows", "rows", x="log2", y=0, legend=True)
            dress(memory_axes, "", "MB of entries held", x="log2", y=0)
