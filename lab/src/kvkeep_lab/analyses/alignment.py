"""Whether E can be left out of merging: KVSlimmer's Fig. 3 and 10-14 (arXiv:2603.00907, Eqs. 31-33).

E = dL/do is the gradient of the loss by a head's output, by backpropagation; L is the sum of the text's next-token
losses. The paper's closed form (Eq. 33) needs cos(E, c_11) = cos(E, c_22) = -cos(E, c_12) (Eq. 32), and its figure
shows the means of a head's cosines over all pairs. Those say little: cos(E, c_22) of one pair is cos(E, c_11) of the
next, so the two means are over the same numbers. The closed form is used for each pair, so here the relation is
looked at pair by pair, too: how the cosines correlate, whether their signs agree, and what becomes of the weight of
the merged key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.binding import bind
from kvkeep.models.watching import Attended, grouped, watching
from kvkeep_lab.analyses.measures import rank_correlation
from kvkeep_lab.analyses.sensitivity import sensitivity

QUERIES = 64
ALIKE = 0.25
"""The share of a head's pairs with the most similar keys, which merging is meant for."""


@dataclass(frozen=True)
class Head:
    """One query head. Means and shares are over ``pairs``, all pairs of neighbours that a sampled query sees.

    cos11, cos12, cos22: the mean of cos(E, c_ij), a point of the paper's figure. size: the mean of |cos(E, c_11)|.
    corr22, corr12: the correlation, over pairs, of cos(E, c_11) with cos(E, c_22) and with -cos(E, c_12); 1 is what
    Eq. 32 says; of two independent residuals of one length it is 0 and 0.71. agree: the share of pairs at which the
    signs of all three are as in Eq. 32; agree_alike: of the quarter of pairs whose keys are most similar. By chance
    it is 0.5: c_12 lies between -c_11 and -c_22. convex, convex_closed: the share of pairs whose weight is within 0
    and 1 by Eq. 30, and by Eq. 33. gap: the mean difference of the two weights where both are; gap_half: of Eq. 30's
    and 1/2 there. None: there is no such figure.
    """

    layer: int
    head: int
    kind: str
    pairs: int
    cos11: float
    cos12: float
    cos22: float
    size: float
    corr22: float | None
    corr12: float | None
    agree: float
    agree_alike: float
    convex: float
    convex_closed: float
    gap: float | None
    gap_half: float | None


MEASURES = tuple(field.name for field in fields(Head))[4:]


@dataclass(frozen=True)
class Alignment:
    """All heads whose output the loss depends on.

    queries: positions that were sampled. loss: the mean, in nats, of the next-token losses from the first of them on.
    spread: over all heads, the rank correlation of the means cos11 with cos22 and with -cos12, which is what the
    paper's scatter plots show; None where there are fewer than three heads.
    """

    tokens: int
    queries: list[int]
    loss: float
    rows: list[Head]
    spread: dict[str, float | None]

    def mean(self, measure: str, layer: int | None = None) -> float:
        """Return the mean of one of :data:`MEASURES` over all heads, or those of a layer."""
        values = [getattr(row, measure) for row in self.rows if layer in (None, row.layer)]
        return fmean(value for value in values if value is not None)


def alignment(
    model: Any,
    ids: Tensor,
    *,
    queries: int = QUERIES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Alignment:
    """Compare E with the c_ij in every head of ``model``, for ``queries`` positions spread over the second half of
    ``ids`` (1, tokens). One pass forward and one back. Raises UsageError for a text too short for that."""
    ids = ids.to(next(model.parameters()).device)
    tokens = ids.shape[1]
    if tokens < 8 or queries < 1:
        raise UsageError(
            f"A text of {tokens} tokens with {queries} queries has no pairs to look at; give at least 8 and 1."
        )
    bind(model)
    geometry = ModelGeometry.from_config(model.config)
    at = torch.linspace(tokens // 2, tokens - 2, queries).round().long().unique().to(ids.device)  # the last has no loss
    seen: list[Attended] = []

    def see(attended: Attended) -> None:
        if not attended.output.requires_grad:
            attended.output.requires_grad_()
        seen.append(attended)

    first = int(at[0])
    with torch.enable_grad(), watching(see):
        # What is predicted before the first query does not depend on any query's output.
        kept = torch.arange(first, tokens, device=ids.device)
        logits = model(ids, use_cache=False, logits_to_keep=kept).logits[0, :-1]
        loss = F.cross_entropy(logits.float(), ids[0, first + 1 :], reduction="sum")
        gradients = torch.autograd.grad(loss, [attended.output for attended in seen], allow_unused=True)
    rows: list[Head] = []
    with torch.no_grad():
        for done, (attended, gradient) in enumerate(zip(seen, gradients, strict=True)):
            if gradient is None:
                raise UnsupportedModelError(f"The loss does not depend on the attention of layer {attended.layer}.")
            rows += _layer(attended, gradient, at, geometry.layers[attended.layer].kind)
            progress(done + 1, len(seen))
    spread = {
        "cos22": rank_correlation(*(_column(rows, name) for name in ("cos11", "cos22"))),
        "-cos12": rank_correlation(_column(rows, "cos11"), -_column(rows, "cos12")),
    }
    return Alignment(tokens, at.tolist(), float(loss.detach()) / (tokens - first - 1), rows, spread)


def _layer(attended: Attended, gradient: Tensor, at: Tensor, kind: str) -> list[Head]:
    heads = attended.query.shape[1]
    values, keys = grouped(attended.value, heads)[0], grouped(attended.key, heads)[0]
    external, outputs = gradient[0][:, at], attended.output[0][:, at]
    pairs = sensitivity(external, attended.weights(at)[0], values, outputs)
    visible = attended.visible(at)[0].expand(heads, -1, -1)
    cos11, cos12, cos22 = pairs.cosines
    usable = visible[..., :-1] & visible[..., 1:] & (cos11 + cos12 + cos22).isfinite()
    likeness = F.cosine_similarity(keys[:, :-1].float(), keys[:, 1:].float(), dim=-1)  # (heads, tokens - 1)
    exact, closed = pairs.exact_weight, pairs.closed_weight
    signs = (cos11 * cos22 > 0) & (cos11 * cos12 < 0)
    rows = []
    for head in range(heads):
        use = usable[head]
        if not use.any():  # a gradient of 0 has no direction
            continue
        a, b, c = (part[head][use] for part in (cos11, cos12, cos22))
        agree, like = signs[head][use], likeness[head].expand_as(use)[use]
        wanted, got = exact[head][use], closed[head][use]
        convex, convex_closed = _within(wanted), _within(got)
        both = convex & convex_closed
        rows.append(
            Head(
                attended.layer,
                head,
                kind,
                len(a),
                cos11=float(a.mean()),
                cos12=float(b.mean()),
                cos22=float(c.mean()),
                size=float(a.abs().mean()),
                corr22=_correlation(a, c),
                corr12=_correlation(a, -b),
                agree=_share(agree),
                agree_alike=_share(agree[like >= like.quantile(1 - ALIKE)]),
                convex=_share(convex),
                convex_closed=_share(convex_closed),
                gap=_finite((wanted - got)[both].abs().mean()),
                gap_half=_finite((wanted - 0.5)[both].abs().mean()),
            )
        )
    return rows


def _within(weights: Tensor) -> Tensor:
    return (weights >= 0) & (weights <= 1)


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())


def _correlation(a: Tensor, b: Tensor) -> float | None:
    return _finite(torch.corrcoef(torch.stack([a, b]))[0, 1]) if len(a) > 1 else None


def _finite(value: Tensor) -> float | None:
    return float(value) if value.isfinite() else None


def _column(rows: list[Head], name: str) -> Tensor:
    return torch.tensor([getattr(row, name) for row in rows])
