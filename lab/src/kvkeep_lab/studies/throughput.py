"""``throughput``: tokens a second by rows of a batch, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from kvkeep.models.loading import Loaded
from kvkeep.stock import STOCK
from kvkeep_lab.figures import FilePath, dress, panels, styled
from kvkeep_lab.reading import takes
from kvkeep_lab.studies.base import BudgetText, Count, Flag, MethodName, Progress, Study
from kvkeep_lab.tables import Table, megabytes, number, times
from kvkeep_lab.tasks.base import Metric
from kvkeep_lab.timing import Case, run

FULL, REVIVER = STOCK, "kvreviver"
PAPER = {(1, REVIVER): 6.48, (2, REVIVER): 10.16, (8, REVIVER): 19.10, (16, REVIVER): 22.46}
PAPER |= {(1, FULL): 12.67, (2, FULL): 21.48}
"""KVReviver's Table 1, tokens a second (Llama-2-7B, one A100)."""

FITS = 8
"""Times as many rows as the full cache's, which the paper's memory holds at 10 %."""


@dataclass(frozen=True)
class Rate:
    """One method with so many rows. held_bytes: entries that attention reads, in full or in a smaller form, after the
    last step. error: why there is nothing else."""

    batch: int
    method: str
    prefill_s: float | None = None
    step_ms: float | None = None
    held_bytes: int = 0
    error: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """Of all rows together, while decoding."""
        return None if self.step_ms is None else 1e3 * self.batch / self.step_ms


@dataclass(frozen=True)
class Rates:
    """All of them."""

    rows: list[Rate]

    def of(self, batch: int, method: str) -> Rate | None:
        """Return what was measured of one method with so many rows; None where it was not."""
        found = (row for row in self.rows if (row.batch, row.method) == (batch, method) and row.step_ms is not None)
        return next(found, None)


class Throughput(Study):
    """KVReviver's Table 1, and methods that keep the same bytes in other ways."""

    name = "throughput"
    about = "tokens a second by rows of a batch: transformers' own cache against methods within a budget"
    protocol = (
        "Rows of random ids, all as long, are read, then decoded one token each a step; medians, rounds interleaved. "
        "Tokens a second are of decoding alone. Rows that fit: how many rows of a method take the bytes of one row of "
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
        [FULL, REVIVER, "h2o", "h2o+quantize:4"], min_length=1, description="who is measured"
    )
    batches: list[Count] = Field([1, 2, 8, 16], min_length=1, description="rows")
    budget: Annotated[BudgetText, Flag("--budget", "-b")] = Field("10%", description="of those that have one")
    length: int = Field(512, ge=32, description="tokens of a row's prompt")
    steps: int = Field(12, ge=2, description="tokens decoded a round")
    rounds: int = Field(2, ge=1, description="how often everything is measured")

    def measure(self, loaded: Loaded, sources: Sequence[Path], seed: int | None, progress: Progress) -> Rates:
        pairs = [(batch, method) for batch in self.batches for method in self.methods]
        listed = [self._case(batch, method) for batch, method in pairs]
        rows = run(loaded.model, listed, rounds=self.rounds, steps=self.steps, progress=progress)
        return Rates(
            [
                Rate(batch, method, row.prefill_s, row.step_ms, row.held_bytes, row.error)
                for (batch, method), row in zip(pairs, rows, strict=True)
            ]
        )

    def _case(self, batch: int, method: str) -> Case:
        options = {"budget": self.budget, "context": self.length + self.steps + 1}
        return Case(
            f"{method}, {batch} rows", self.length, method, options if "budget" in takes(method) else {}, batch=batch
        )

    def scores(self, found: Rates) -> dict[str, float]:
        scores: dict[str, float] = {}
        for batch in self.batches:
            full, mine = found.of(batch, FULL), found.of(batch, REVIVER)
            if full is None or mine is None:
                continue
            assert full.tokens_per_s is not None and mine.tokens_per_s is not None
            if batch == 1:
                scores |= {"full_1": full.tokens_per_s, "reviver_1": mine.tokens_per_s}
                scores |= {"fits": full.held_bytes / mine.held_bytes}
            if batch in (1, 2):
                scores[f"ratio_{batch}"] = mine.tokens_per_s / full.tokens_per_s
        most = max(self.batches)
        full, mine = found.of(most // FITS, FULL), found.of(most, REVIVER)
        if full is not None and mine is not None:
            assert full.tokens_per_s is not None and mine.tokens_per_s is not None
            scores["best"] = mine.tokens_per_s / full.tokens_per_s
        return scores

    def tables(self, found: Rates) -> list[Table]:
        """Return Table 1, longer."""
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
            notes=[f"`{row.method}`, {row.batch} rows: {row.error}" for row in found.rows if row.error],
        )
        for row in (row for row in found.rows if not row.error):
            rival, rate = found.of(row.batch, FULL), row.tokens_per_s
            ratio = None if rival is None or not rate or not rival.tokens_per_s else rate / rival.tokens_per_s
            fits = "-" if one is None else f"{one.held_bytes * row.batch / row.held_bytes:.1f}"
            paper = PAPER.get((row.batch, row.method))
            assert row.prefill_s is not None and row.step_ms is not None
            measured = [f"{row.prefill_s:.2f} s", f"{row.step_ms:.0f} ms", number(rate), times(ratio)]
            sizes = [megabytes(row.held_bytes), fits, "" if paper is None else f"{paper:.2f}"]
            table.rows.append([f"`{row.method}`, {row.batch}", *measured, *sizes])
        return [table]

    def draw(self, found: Rates, path: FilePath, *, title: str) -> None:
        with panels(path, f"{title}, budget {self.budget}", 2, 4.2, sharey=True) as (rows, held):
            for place, method in enumerate(self.methods):
                mine = [row for row in found.rows if row.method == method and not row.error]
                rates, style = [row.tokens_per_s for row in mine], styled(place, method, None)
                if mine:
                    rows.plot([row.batch for row in mine], rates, **style)
                    held.plot([row.held_bytes / 1e6 for row in mine], rates, **style)
            dress(rows, "tokens a second, all rows", "rows", x="log2", y=0, legend=True)
            dress(held, "", "MB of entries held", x="log2", y=0)
