"""``recompute``: is it faster to recompute evicted entries, or to read them?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from kvkeep.errors import unknown
from kvkeep.models.loading import Loaded
from kvkeep_lab.recompute import APART, ATTEND, READ, RECOMPUTE, ROLLED, Report, Row, run
from kvkeep_lab.recompute_figure import PAPER, draw_recompute
from kvkeep_lab.shapes import SHAPES, shaped
from kvkeep_lab.studies.base import Progress, Study
from kvkeep_lab.tables import Table, number
from kvkeep_lab.tasks.base import Metric


@dataclass(frozen=True)
class Reports:
    """The loaded model's, and those of layers of other shapes."""

    reports: list[Report]


class Recompute(Study):
    """KV-Direct's Fig. 7; see :mod:`kvkeep_lab.recompute` for the ways."""

    name = "recompute"
    about = "keys and values of N tokens in one layer: recomputed, read, or attended where they lie"
    protocol = (
        "One layer's keys and values of N tokens: projected from their residuals in one product, copied whole or entry "
        "by entry, or attended where they lie; from memory and from disk, with warm buffers and with cold ones (caches "
        "swept, freed memory returned, files out of the page cache). The fastest round's time. Arithmetic: what the "
        "measured rates of products and copies alone allow."
    )
    found = Reports
    metrics: ClassVar[tuple[Metric, ...]] = tuple(
        Metric(f"{name}_{count}", f"recompute by {words}, N = {count}", "lower", "number")
        for count in (1, 50, 100, 500)
        for name, words in (
            ("warm", "read, memory, warm"),
            ("cold", "read, memory, cold"),
            ("disk", "read, disk, cold"),
        )
    )

    counts: list[Annotated[int, Field(ge=1)]] = Field([1, 10, 50, 100, 200, 500, 1000], min_length=1, description="N")
    rounds: int = Field(5, ge=1, description="how often everything is measured")
    beside: list[str] = Field(
        ["qwen2.5-0.5b", "qwen3-0.6b", "qwen2.5-1.5b"],
        description=f"random layers of these shapes: {', '.join(SHAPES)}",
    )
    slow: bool = Field(True, description="also recall that runs whole layers")

    @field_validator("beside")
    @classmethod
    def _known(cls, beside: list[str]) -> list[str]:
        for name in beside:
            if name not in SHAPES:
                raise unknown("shape", name, SHAPES)
        return beside

    def measure(self, loaded: Loaded, sources: Sequence[Path], seed: int, progress: Progress) -> Reports:
        """Measure the model, then the shapes."""
        names, reports = [loaded.name, *self.beside], []
        for place, name in enumerate(names):
            model = shaped(name, loaded.model.dtype, loaded.model.device) if place else loaded.model

            def tell(text: str, done: int, total: int, before: int = place) -> None:
                progress(text, before + done / total, len(names))

            report = run(
                model, name, counts=self.counts, rounds=self.rounds, slow=self.slow and not place, progress=tell
            )
            if report.interrupted:
                raise KeyboardInterrupt
            reports.append(report)
        return Reports(reports)

    def scores(self, found: Reports) -> dict[str, float]:
        """Return the loaded model's ratios."""
        rows, scores = found.reports[0].rows, {}
        for name, place, buffers in (("warm", "device", "warm"), ("cold", "device", "cold"), ("disk", "disk", "cold")):
            for row in (row for row in rows if (row.way, row.place, row.buffers) == (READ, place, buffers)):
                if row.recompute_ratio is not None and row.n in (1, 50, 100, 500):
                    scores[f"{name}_{row.n}"] = row.recompute_ratio
        return scores

    def tables(self, found: Reports) -> list[Table]:
        """Return times and ratios of the loaded model, and the ratios of all."""
        return [*self._times(found.reports[0]), self._ratios(found)]

    def _times(self, report: Report) -> list[Table]:
        tables = []
        ways = (RECOMPUTE, READ, APART, ATTEND, *ROLLED)
        for place, buffers in dict.fromkeys((row.place, row.buffers) for row in report.rows):
            rows = {(row.n, row.way): row for row in report.rows if (row.place, row.buffers) == (place, buffers)}
            shown = [way for way in ways if any(key[1] == way for key in rows)]
            table = Table(
                f"{report.model}: ms for one layer, from {place}, {buffers} buffers",
                ["N", *shown, "recompute, arithmetic", "read, arithmetic"],
            )
            for count in dict.fromkeys(count for count, _ in rows):
                times = [number(rows[count, way].ms) if (count, way) in rows else "-" for way in shown]
                roofs = [number(rows[count, way].roofline_ms) for way in (RECOMPUTE, READ)]
                table.rows.append([f"{count:,}", *times, *roofs])
            tables.append(table)
        return tables

    def _ratios(self, found: Reports) -> Table:
        cases = list(dict.fromkeys((row.place, row.buffers) for row in found.reports[0].rows))
        table = Table(
            "Recompute by read: below 1, recomputing is faster",
            ["model, N", *(f"{place}, {buffers}" for place, buffers in cases), "entry by entry", "the paper's"],
            notes=["Entry by entry: from memory, warm, of entries that lie apart."],
        )
        for report in found.reports:
            rows = {(row.n, row.way, row.place, row.buffers): row for row in report.rows}
            for count in self.counts:
                ratios = [_ratio(rows.get((count, READ, *case))) for case in cases]
                apart = _ratio(rows.get((count, APART, "device", "warm")))
                paper = "-".join(f"{value:g}" for value in dict.fromkeys(PAPER.get(count, ())))
                table.rows.append([f"{report.model}, {count:,}", *ratios, apart, paper])
        return table

    def draw(self, found: Reports, path: str | os.PathLike[str], *, title: str) -> None:
        """Draw Fig. 7."""
        draw_recompute(found.reports, path, title=title)


def _ratio(row: Row | None) -> str:
    return "-" if row is None else number(row.recompute_ratio, 2)
