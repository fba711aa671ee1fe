"""Why keys would be alike and values not: KVSlimmer's Fig. 2 (arXiv:2603.00907, section 3.2).

With y_t = x_t W of one head, W = U S V^T and l_i = s_i^2 the eigenvalues of W W^T in falling order, the cosine of
adjacent tokens is a sum over modes (Eqs. 7-8)

    cos(y_t, y_t+1) = sum_i c_i,    c_i = l_i p_t,i p_t+1,i / (|y_t| |y_t+1|),    p_t,i = x_t u_i

x is what the projection is handed (the normalised residual), so y has neither bias nor norm nor rotation. As s_i p_t,i
is the i-th coordinate of y_t in V, modes cost one product of y with V, and U is never formed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import decoder_of
from kvkeep.models.head_weights import HeadWeights, head_weights, inputs
from kvkeep.models.watching import Attended, watching
from kvkeep_lab.analyses.measures import effective_rank, rank_correlation

PROJECTIONS = ("query", "key", "value")
ENERGY = 0.9


@dataclass(frozen=True)
class Projection:
    """One projection of one layer; means are over its heads, and over pairs of tokens.

    cosine: of adjacent tokens (Eq. 5), the sum of ``contributions``. apart: of tokens half the text apart, alike for
    other reasons than being neighbours. attended: of adjacent tokens as attention is handed them, with bias, norms
    and rotation. modes: the share of all modes that it takes to hold 90 % of the energy sum_i l_i. eigenvalues: l_i
    over their sum, contributions: c_i, falling in l. head_cosines, head_modes: the two by head.
    """

    layer: int
    kind: str
    projection: str
    heads: int
    dim: int
    cosine: float
    apart: float
    attended: float
    modes: float
    eigenvalues: list[float]
    contributions: list[float]
    head_cosines: list[float]
    head_modes: list[float]


@dataclass(frozen=True)
class Spectra:
    """All projections, and over all heads the rank correlation of ``modes`` and ``cosine`` by projection and of all
    ("all"): the paper's account expects it to be strongly negative. None: fewer than three heads, or all alike."""

    tokens: int
    rows: list[Projection]
    correlation: dict[str, float | None]


def spectra(model: Any, ids: Tensor, *, progress: Callable[[int, int], None] = lambda done, total: None) -> Spectra:
    """Look at every layer of ``model`` while it reads ``ids`` (1, tokens). Raises UnsupportedModelError for a family
    whose heads have no weights of their own."""
    weights = head_weights(model)
    geometry = ModelGeometry.from_config(model.config)
    rows: list[Projection] = []
    with torch.no_grad(), inputs(weights) as taken:

        def see(attended: Attended) -> None:
            x = taken.pop(attended.layer)[0].float()
            kind = geometry.layers[attended.layer].kind
            rows.extend(_layer(weights[attended.layer], kind, x, attended))
            progress(attended.layer + 1, len(weights))

        with watching(see):
            decoder_of(model)(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    return Spectra(ids.shape[1], rows, _correlations(rows))


def _layer(weights: HeadWeights, kind: str, x: Tensor, attended: Attended) -> list[Projection]:
    rows = []
    handed = {"query": attended.query, "key": attended.key, "value": attended.value}
    for name, weight in weights.parts.items():
        eigenvalues, vectors = modes(weight)
        coordinates = torch.einsum("td,hed->hte", x, weight) @ vectors  # y V: (heads, tokens, dim)
        contributions = contributed(coordinates).mean(1)  # (heads, dim)
        cosines = contributions.sum(-1)
        held = effective_rank(eigenvalues, ENERGY) / eigenvalues.shape[-1]
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
                modes=float(held.mean()),
                eigenvalues=(eigenvalues / eigenvalues.sum(-1, keepdim=True)).mean(0).tolist(),
                contributions=contributions.mean(0).tolist(),
                head_cosines=cosines.tolist(),
                head_modes=held.tolist(),
            )
        )
    return rows


def modes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of M = W W^T that can differ from 0, falling, (heads, dim), and V, whose columns are in
    that order, (heads, dim, dim), of ``weight`` (heads, dim, hidden), the paper's W transposed. They are those of W^T
    W, which is dim by dim; taken in float64, returned in float32."""
    wide = weight.double()
    values, vectors = torch.linalg.eigh(wide @ wide.transpose(-1, -2))
    return values.flip(-1).clamp(min=0).float(), vectors.flip(-1).float()


def contributed(rows: Tensor, by: int = 1) -> Tensor:
    """Return c_i (Eq. 8) of rows (heads, tokens, dim), coordinates in V, with those ``by`` tokens later: (heads,
    tokens - by, dim). Their sum over dim is the cosine."""
    unit = torch.nn.functional.normalize(rows, dim=-1)
    return unit[:, :-by] * unit[:, by:]


def _correlations(rows: list[Projection]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in (*PROJECTIONS, "all"):
        mine = [row for row in rows if name in (row.projection, "all")]
        held = torch.tensor([value for row in mine for value in row.head_modes])
        cosines = torch.tensor([value for row in mine for value in row.head_cosines])
        found[name] = rank_correlation(held, cosines)
    return found
