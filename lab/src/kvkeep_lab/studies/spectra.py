"""``spectra``: how alike neighbours' queries, keys and values are, and the weights behind it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from kvkeep.models.loading import Loaded
from kvkeep_lab.analyses.figures import draw_spectra
from kvkeep_lab.analyses.spectra import PROJECTIONS, spectra
from kvkeep_lab.analyses.spectra import Spectra as Found
from kvkeep_lab.studies.base import Progress, TextStudy, counted
from kvkeep_lab.tables import Table, number, percent
from kvkeep_lab.tasks.base import Metric


class Spectra(TextStudy):
    """KVSlimmer's Fig. 2; see :mod:`kvkeep_lab.analyses.spectra` for the formulas."""

    name = "spectra"
    about = "cosines of neighbours, eigenvalues and contributions of modes, for queries, keys and values"
    protocol = (
        "A passage is read once. Cosine: of neighbours' projections (Eq. 5), of tokens half the text apart, and of "
        "neighbours as attention is handed them. Modes: the share of eigenvalues that holds 90 % of their sum. Means "
        "over heads, layers and pairs."
    )
    found = Found
    metrics: ClassVar[tuple[Metric, ...]] = (
        *(Metric(f"cosine_{name}", f"cosine of neighbours, {name}", "higher", "number") for name in PROJECTIONS),
        *(Metric(f"apart_{name}", f"cosine far apart, {name}", "higher", "number") for name in PROJECTIONS),
        *(Metric(f"modes_{name}", f"modes with 90 % of the energy, {name}", "lower") for name in PROJECTIONS),
        Metric("explained", "rank correlation over all heads of modes and cosine", "lower", "number"),
        Metric("within", "rank correlation of modes and cosine within Q, K and V, mean", "lower", "number"),
    )

    def measure(self, loaded: Loaded, sources: Sequence[Path], seed: int, progress: Progress) -> Found:
        """Look at every layer."""
        ids = self.passage(loaded, sources, seed)
        return spectra(loaded.model, ids, progress=counted(progress, "layers"))

    def scores(self, found: Found) -> dict[str, float]:
        """Return means over layers."""
        scores = {
            f"{short}_{name}": _mean(found, name, measure)
            for name in PROJECTIONS
            for short, measure in (("cosine", "cosine"), ("apart", "apart"), ("modes", "modes"))
        }
        within = [value for name in PROJECTIONS if (value := found.correlation[name]) is not None]
        every = found.correlation["all"]
        scores |= {} if every is None else {"explained": every}
        return scores | ({"within": fmean(within)} if within else {})

    def tables(self, found: Found) -> list[Table]:
        """Return the means by projection."""
        table = Table(
            "Means over layers and heads",
            ["", "cosine of neighbours", "far apart", "as attended", "modes with 90 %", "modes and cosine, over heads"],
            notes=["The last column is a rank correlation: if concentrated spectra made neighbours alike, near -1."],
        )
        for name in PROJECTIONS:
            cosines = [number(_mean(found, name, measure), 2) for measure in ("cosine", "apart", "attended")]
            held = percent(_mean(found, name, "modes"), 0)
            table.rows.append([name, *cosines, held, number(found.correlation[name], 2)])
        table.rows.append(["all", "", "", "", "", number(found.correlation["all"], 2)])
        return [table]

    def draw(self, found: Found, path: str | os.PathLike[str], *, title: str) -> None:
        """Draw Fig. 2."""
        draw_spectra(found, path, title=f"{title}, {found.tokens:,} tokens")


def _mean(found: Found, name: str, measure: str) -> float:
    return fmean(getattr(row, measure) for row in found.rows if row.projection == name)
