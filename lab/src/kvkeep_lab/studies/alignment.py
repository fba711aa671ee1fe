"""``alignment``: whether the gradient that KVSlimmer leaves out stands as it says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from kvkeep.models.loading import Loaded
from kvkeep_lab.analyses.alignment import MEASURES, QUERIES, Alignment, alignment
from kvkeep_lab.analyses.figures import draw_alignment
from kvkeep_lab.studies.base import Progress, TextStudy, counted
from kvkeep_lab.tables import Table, number, percent
from kvkeep_lab.tasks.base import Metric

_SHARES = ("agree", "agree_alike", "convex", "convex_closed")
_HEADINGS = {
    "cos11": "cos(E, c11)",
    "cos12": "cos(E, c12)",
    "cos22": "cos(E, c22)",
    "size": "mean size of cos(E, c11)",
    "corr22": "pairs: c11 with c22",
    "corr12": "pairs: c11 with -c12",
    "agree": "signs as in Eq. 32",
    "agree_alike": "of alike keys",
    "convex": "weight of Eq. 30 in [0, 1]",
    "convex_closed": "of Eq. 33",
    "gap": "difference of the two",
    "gap_half": "of Eq. 30 and 1/2",
}


class Aligned(TextStudy):
    """KVSlimmer's Fig. 3 and 10-14; see :mod:`kvkeep_lab.analyses.alignment` for what is measured."""

    name = "alignment"
    about = "cosines of E = dL/do with c11, c12 and c22, by head, and the relation pair by pair"
    protocol = (
        "One pass forward and one back through a passage; E is the gradient of the sum of next-token losses by a "
        "head's output. For queries of the second half and all neighbours each sees: cosines of E with the c_ij "
        "(Eq. 31), their means by head as in the paper, and the same relation pair by pair."
    )
    found = Alignment
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("spread22", "rank correlation over heads of mean cos(E, c11) and cos(E, c22)", "higher", "number"),
        Metric("spread12", "rank correlation over heads of mean cos(E, c11) and -cos(E, c12)", "higher", "number"),
        Metric("corr22", "correlation over pairs of cos(E, c11) and cos(E, c22)", "higher", "number"),
        Metric("corr12", "correlation over pairs of cos(E, c11) and -cos(E, c12)", "higher", "number"),
        Metric("agree", "pairs whose signs are as in Eq. 32"),
        Metric("convex", "pairs whose weight by Eq. 30 is within 0 and 1"),
        Metric("gap", "difference of the weights of Eq. 33 and 30", "lower", "number"),
        Metric("gap_half", "difference of 1/2 and Eq. 30", "lower", "number"),
    )

    queries: int = Field(QUERIES, ge=1, description="queries, over the second half")

    def measure(self, loaded: Loaded, sources: Sequence[Path], seed: int, progress: Progress) -> Alignment:
        """Pass forward and back."""
        ids = self.passage(loaded, sources, seed)
        return alignment(loaded.model, ids, queries=self.queries, progress=counted(progress, "layers"))

    def scores(self, found: Alignment) -> dict[str, float]:
        """Return correlations and means over heads."""
        spread = {"spread22": found.spread["cos22"], "spread12": found.spread["-cos12"]}
        scores = {name: value for name, value in spread.items() if value is not None}
        for name in ("corr22", "corr12", "agree", "convex", "gap", "gap_half"):
            if any(getattr(row, name) is not None for row in found.rows):
                scores[name] = found.mean(name)
        return scores

    def tables(self, found: Alignment) -> list[Table]:
        """Return the means beside Eq. 32's and chance's."""
        table = Table(
            "Means over heads",
            ["", "here", "if Eq. 32 held", "two independent residuals"],
            notes=[
                f"{len(found.queries)} queries, {sum(row.pairs for row in found.rows):,} pairs in {len(found.rows)} "
                f"heads; the loss is {found.loss:.2f} nats a token."
            ],
        )
        beside = {"corr22": ("1", "0"), "corr12": ("1", "0.71"), "agree": ("100 %", "50 %")}
        beside |= {"agree_alike": ("100 %", "50 %"), "convex": ("100 %", ""), "gap": ("0", "")}
        for name in MEASURES:
            if any(getattr(row, name) is not None for row in found.rows):
                mean = found.mean(name)
                told = percent(mean, 0) if name in _SHARES else number(mean, 2)
                table.rows.append([_HEADINGS[name], told, *beside.get(name, ("", ""))])
        return [table]

    def draw(self, found: Alignment, path: str | os.PathLike[str], *, title: str) -> None:
        """Draw Fig. 3, and the relation pair by pair."""
        draw_alignment(found, path, title=f"{title}, {found.tokens:,} tokens, {len(found.queries)} queries")
