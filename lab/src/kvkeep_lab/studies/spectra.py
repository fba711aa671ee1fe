"""``spectra``: tests why keys are similar and values are not (KVSlimmer's Fig. 2, arXiv:2603.00907, section 3.2).

With y_t = x_t W of one head, W = U S V^T and l_i = s_i^2 the eigenvalues of W W^T in falling order, the cosine of
adjacent tokens is a sum over modes (Eqs. 7-8)

    cos(y_t, y_t+1) = sum_i c_i,    c_i = l_i p_t,i p_t+1,i / (|y_t| |y_t+1|),    p_t,i = x_t u_i

x is the input of the projection (the normalised residual), so y has no bias, norm or rotation. As s_i p_t,i
is the i-th coordinate of y_t in V, modes cost one product of y with V. U is not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import decoder_of
from kvkeep_lab.attention_inputs import Attended, watching
from kvkeep_lab.figures import COLOURS, FilePath, dress, panels, styled
from kvkeep_lab.head_weights import HeadWeights, head_weights, inputs
from kvkeep_lab.statistics import each, effective_rank, mean, rank_correlation, where
from kvkeep_lab.studies.base import TextStudy, Trial
from kvkeep_lab.tables import Table, fixed, number, percent
from kvkeep_lab.tasks.base import Metric

PROJECTIONS = ("query", "key", "value")
ENERGY = 0.9


@dataclass(frozen=True)
class Projection:
    """One projection of one layer. Means are over its heads and over pairs of tokens."""

    layer: int
    kind: str
    projection: str
    heads: int
    dim: int
    cosine: float
    """Mean cosine of adjacent tokens (Eq. 5): the sum of ``contributions``."""
    apart: float
    """Mean cosine of tokens at a distance of half the text, for comparison with neighbours."""
    attended: float
    """Mean cosine of adjacent tokens in the input of attention, with bias, norms and rotation."""
    modes: float
    """Share of modes that hold 90 % of the energy sum_i l_i."""
    eigenvalues: list[float]
    """l_i relative to their sum, in falling order."""
    contributions: list[float]
    """c_i, in falling order of l_i."""
    head_cosines: list[float]
    """``cosine`` by head."""
    head_modes: list[float]
    """``modes`` by head."""


@dataclass(frozen=True)
class Spectra:
    """All projections."""

    tokens: int
    rows: list[Projection]
    correlation: dict[str, float | None]
    """Rank correlation of ``modes`` and ``cosine`` over heads, by projection and for all of them ("all"). The paper
    predicts a strongly negative one. None: fewer than three heads, or equal values."""

    def mean(self, projection: str, measure: str, layer: int | None = None) -> float | None:
        """Return the mean of a measure over layers, or that of one layer; None if the layer lacks the projection."""
        rows = where(self.rows, projection=projection, **({} if layer is None else {"layer": layer}))
        return mean(rows, measure)


class SpectraStudy(TextStudy):
    """KVSlimmer's Fig. 2, on any text."""

    name = "spectra"
    about = "cosines of neighbours, eigenvalues and contributions of modes, for queries, keys and values"
    protocol = (
        "The model reads a passage once. Cosine: between the projections of neighbours (Eq. 5), of tokens half "
        "the text apart, and of neighbours as attention receives them. Modes: the share of the eigenvalues that "
        "holds 90 % of their sum. Figures are means over heads, layers and pairs."
    )
    found = Spectra
    metrics: ClassVar[tuple[Metric, ...]] = (
        *(Metric(f"cosine_{name}", f"cosine of neighbours, {name}", "higher", "number") for name in PROJECTIONS),
        *(Metric(f"apart_{name}", f"cosine far apart, {name}", "higher", "number") for name in PROJECTIONS),
        *(Metric(f"modes_{name}", f"modes with 90 % of the energy, {name}", "lower") for name in PROJECTIONS),
        Metric("explained", "rank correlation over all heads of modes and cosine", "lower", "number"),
        Metric("within", "rank correlation of modes and cosine within Q, K and V, mean", "lower", "number"),
    )

    def measure(self, trial: Trial) -> Spectra:
        """Measure every layer in one pass over the passage. Raises UnsupportedModelError for a family without weights
        per head."""
        model, ids = trial.model, self.passage(trial)
        weights = head_weights(model)
        geometry = ModelGeometry.from_config(model.config)
        rows: list[Projection] = []
        with torch.no_grad(), inputs(weights) as taken:

            def see(attended: Attended) -> None:
                x = taken.pop(attended.layer)[0].float()
                rows.extend(_layer(weights[attended.layer], geometry.layers[attended.layer].kind, x, attended))
                trial.progress("layers", attended.layer + 1, len(weights))

            with watching(see):
                decoder_of(model)(input_ids=ids, use_cache=False)
        return Spectra(ids.shape[1], rows, _correlations(rows))

    def scores(self, found: Spectra) -> dict[str, float]:
        pairs = product(("cosine", "apart", "modes"), PROJECTIONS)
        wanted = {f"{name}_{projection}": found.mean(projection, name) for name, projection in pairs}
        within = [value for name in PROJECTIONS if (value := found.correlation[name]) is not None]
        wanted |= {"explained": found.correlation["all"], "within": fmean(within) if within else None}
        return {name: value for name, value in wanted.items() if value is not None}

    def tables(self, found: Spectra) -> list[Table]:
        table = Table(
            "Means over layers and heads",
            ["", "cosine of neighbours", "far apart", "as attended", "modes with 90 %", "modes and cosine, over heads"],
            notes=["The last column is a rank correlation: if concentrated spectra made neighbours alike, near -1."],
        )
        for name in PROJECTIONS:
            cosines = [number(found.mean(name, measure), 2) for measure in ("cosine", "apart", "attended")]
            modes_held = percent(found.mean(name, "modes"), 0)
            table.rows.append([name, *cosines, modes_held, number(found.correlation[name], 2)])
        table.rows.append(["all", "", "", "", "", number(found.correlation["all"], 2)])
        return [table]

    def details(self, found: Spectra) -> list[Table]:
        words = {"cosine": "cosine", "apart": "far apart", "attended": "as attended"}
        headings = [f"{word}, {name[0].upper()}" for word in (*words.values(), "modes") for name in PROJECTIONS]
        table = Table("Queries, keys and values by layer", ["layer", *headings])
        for layer in each(found.rows, "layer"):
            cells = [fixed(found.mean(name, measure, layer)) for measure in words for name in PROJECTIONS]
            modes_held = (percent(found.mean(name, "modes", layer), 0) for name in PROJECTIONS)
            table.rows.append([f"{layer}", *cells, *modes_held])
        return [table]

    def draw(self, found: Spectra, path: FilePath, *, title: str) -> None:
        """Draw Fig. 2: cosines by layer, eigenvalues and contributions by mode (thin lines: layers; bold: mean)."""
        title = f"{title}, {found.tokens:,} tokens"
        with panels(path, title, 3) as (left, middle, right):
            for place, name in enumerate(PROJECTIONS):
                rows = where(found.rows, projection=name)
                layers, colour = [row.layer for row in rows], COLOURS[place]
                left.plot(layers, [row.cosine for row in rows], **styled(place, name, 3.5))
                left.plot(layers, [row.apart for row in rows], color=colour, linestyle=":", label=f"{name}, far apart")
                for axes, attribute in ((middle, "eigenvalues"), (right, "contributions")):
                    lines = [getattr(row, attribute) for row in rows]
                    for line in lines:
                        axes.plot(_shares(line), line, color=colour, alpha=0.12, linewidth=0.6)
                    same_width = [line for line, row in zip(lines, rows, strict=True) if row.dim == rows[0].dim]
                    middling = [fmean(values) for values in zip(*same_width, strict=True)]
                    axes.plot(_shares(middling), middling, color=colour, linewidth=2)
            across = "mode, % of all, largest first"
            dress(left, "cosine of neighbours", "layer")
            dress(middle, "eigenvalue, share of the sum", across, y="log")
            dress(right, "contribution c_i to the cosine", across)
            middle.set_ylim(bottom=1e-5)
            right.set_yscale("symlog", linthresh=1e-3)
            handles, labels = left.get_legend_handles_labels()
            left.figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)


def _layer(weights: HeadWeights, kind: str, x: Tensor, attended: Attended) -> list[Projection]:
    rows = []
    handed = {"query": attended.query, "key": attended.key, "value": attended.value}
    for name, weight in weights.parts.items():
        eigenvalues, vectors = modes(weight)
        coordinates = torch.einsum("td,hed->hte", x, weight) @ vectors  # y V: (heads, tokens, dim)
        contributions = contributed(coordinates).mean(1)  # (heads, dim)
        cosines = contributions.sum(-1)
        modes_held = effective_rank(eigenvalues, ENERGY) / eigenvalues.shape[-1]
        rows.append(
            Projection(
                layer=weights.layer,
                kind=kind,
                projection=name,
                heads=weight.shape[0],
                dim=weight.shape[1],
                cosine=float(cosines.mean()),
                apart=float(contributed(coordinates, x.shape[0] // 2).sum(-1).mean()),
                attended=float(contributed(handed[name][0].float()).sum(-1).mean()),
                modes=float(modes_held.mean()),
                eigenvalues=(eigenvalues / eigenvalues.sum(-1, keepdim=True)).mean(0).tolist(),
                contributions=contributions.mean(0).tolist(),
                head_cosines=cosines.tolist(),
                head_modes=modes_held.tolist(),
            )
        )
    return rows


def modes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of M = W W^T that can differ from 0, in falling order, (heads, dim), and V with columns in
    that order, (heads, dim, dim). ``weight``: the paper's W transposed, (heads, dim, hidden). The eigenvalues are those
    of W^T W, which is dim by dim. They are computed in float64 and returned in float32."""
    wide = weight.double()
    values, vectors = torch.linalg.eigh(wide @ wide.transpose(-1, -2))
    return values.flip(-1).clamp(min=0).float(), vectors.flip(-1).float()


def contributed(rows: Tensor, by: int = 1) -> Tensor:
    """Return c_i (Eq. 8) of each row and the row ``by`` tokens later, (heads, tokens - by, dim). Their sum over dim is
    the cosine. ``rows``: coordinates in V, (heads, tokens, dim)."""
    unit = torch.nn.functional.normalize(rows, dim=-1)
    return unit[:, :-by] * unit[:, by:]


def _correlations(rows: list[Projection]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in (*PROJECTIONS, "all"):
        mine = [row for row in rows if name in (row.projection, "all")]
        modes_held = torch.tensor([value for row in mine for value in row.head_modes])
        cosines = torch.tensor([value for row in mine for value in row.head_cosines])
        found[name] = rank_correlation(modes_held, cosines)
    return found


def _shares(values: list[float]) -> list[float]:
    return [100 * (mode + 1) / len(values) for mode in range(len(values))]
