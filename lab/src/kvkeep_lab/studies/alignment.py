"""``alignment``: whether E can be left out of merging (KVSlimmer's Fig. 3 and 10-14, arXiv:2603.00907, Eqs. 31-33).

E = dL/do is the gradient of the sum of the text's next-token losses by a head's output. The closed form (Eq. 33) needs
cos(E, c_11) = cos(E, c_22) = -cos(E, c_12) (Eq. 32). The paper's figure shows the means of each head's cosines. These
means agree in any case, because cos(E, c_22) of one pair is cos(E, c_11) of the next. The study therefore also tests
the relation pair by pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvkeep.errors import UnsupportedModelError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.binding import bind
from kvkeep_lab.attention_inputs import Attended, grouped, watching
from kvkeep_lab.figures import FilePath, blank, dress, save, styled
from kvkeep_lab.sensitivity import sensitivity
from kvkeep_lab.statistics import each, mean, rank_correlation, where
from kvkeep_lab.studies.base import TextStudy, Trial
from kvkeep_lab.tables import Table, fixed, number, percent
from kvkeep_lab.tasks.base import Metric

SIMILAR_SHARE = 0.25
"""Share of a head's pairs that have the most similar keys, for which merging is intended."""


@dataclass(frozen=True)
class Head:
    """One query head. Means and shares are over ``pairs``: all pairs of neighbours that a sampled query sees. None: the
    figure is undefined."""

    layer: int
    head: int
    kind: str
    pairs: int
    cos11: float
    """Mean of cos(E, c_11): a coordinate of a point in the paper's figure."""
    cos12: float
    """Mean of cos(E, c_12)."""
    cos22: float
    """Mean of cos(E, c_22)."""
    size: float
    """Mean of |cos(E, c_11)|."""
    corr22: float | None
    """Correlation over pairs of cos(E, c_11) with cos(E, c_22). Eq. 32 gives 1; two independent residuals of equal
    length give 0."""
    corr12: float | None
    """Correlation over pairs of cos(E, c_11) with -cos(E, c_12). Eq. 32 gives 1; two independent residuals of equal
    length give 0.71."""
    agree: float
    """Share of pairs whose three signs are as in Eq. 32. Chance gives 0.5, because c_12 lies between -c_11 and
    -c_22."""
    agree_alike: float
    """The same share among the quarter of pairs with the most similar keys."""
    convex: float
    """Share of pairs whose weight by Eq. 30 is between 0 and 1."""
    convex_closed: float
    """Share of pairs whose weight by Eq. 33 is between 0 and 1."""
    gap: float | None
    """Mean difference of the two weights where both are between 0 and 1."""
    gap_half: float | None
    """Mean difference of Eq. 30's weight and 1/2 for the same pairs."""


MEASURES = tuple(field.name for field in fields(Head))[4:]
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


@dataclass(frozen=True)
class Alignment:
    """All heads whose output affects the loss."""

    tokens: int
    queries: list[int]
    """Sampled positions."""
    loss: float
    """Mean next-token loss from the first sampled position, in nats."""
    rows: list[Head]
    spread: dict[str, float | None]
    """Rank correlation over heads of the means cos11 with cos22, and with -cos12, as in the paper's scatter plots; None
    for fewer than three heads."""

    def mean(self, measure: str, layer: int | None = None) -> float | None:
        """Return the mean of one of :data:`MEASURES` over all heads, or over those of a layer; None without values."""
        return mean(self.rows if layer is None else where(self.rows, layer=layer), measure)


class AlignmentStudy(TextStudy):
    """KVSlimmer's Fig. 3 and 10-14, on any text."""

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

    queries: int = Field(64, ge=1, description="queries, over the second half")

    def measure(self, trial: Trial) -> Alignment:
        model, ids = trial.model, self.passage(trial)
        tokens = ids.shape[1]
        bind(model)
        geometry = ModelGeometry.from_config(model.config)
        at = torch.linspace(tokens // 2, tokens - 2, self.queries)  # the last token has no loss
        at = at.round().long().unique().to(ids.device)
        seen, gradients, loss = backward(model, ids, int(at[0]))
        rows: list[Head] = []
        with torch.no_grad():
            for done, (attended, gradient) in enumerate(zip(seen, gradients, strict=True), start=1):
                if gradient is None:
                    raise UnsupportedModelError(f"The loss does not depend on the attention of layer {attended.layer}.")
                rows += _layer(attended, gradient, at, geometry.layers[attended.layer].kind)
                trial.progress("layers", done, len(seen))
        cos11, cos12, cos22 = (torch.tensor([getattr(row, name) for row in rows]) for name in MEASURES[:3])
        spread = {"cos22": rank_correlation(cos11, cos22), "-cos12": rank_correlation(cos11, -cos12)}
        return Alignment(tokens, at.tolist(), loss, rows, spread)

    def scores(self, found: Alignment) -> dict[str, float]:
        scores = {"spread22": found.spread["cos22"], "spread12": found.spread["-cos12"]}
        scores |= {name: found.mean(name) for name in ("corr22", "corr12", "agree", "convex", "gap", "gap_half")}
        return {name: value for name, value in scores.items() if value is not None}

    def tables(self, found: Alignment) -> list[Table]:
        """Return the means, with the values expected by Eq. 32 and by chance."""
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
            if (value := found.mean(name)) is not None:
                shown = percent(value, 0) if name in _SHARES else number(value, 2)
                table.rows.append([_HEADINGS[name], shown, *beside.get(name, ("", ""))])
        return [table]

    def details(self, found: Alignment) -> list[Table]:
        pairs = [fixed(found.spread[name]) for name in ("cos22", "-cos12")]
        table = Table(
            "By layer, means over its heads",
            ["layer", *_HEADINGS.values()],
            notes=[
                f"Rank correlation over heads of the mean of cos(E, c11) with that of c22 {pairs[0]}, of -c12 "
                f"{pairs[1]}; but these are means over the same tokens, one apart."
            ],
        )
        for layer in each(found.rows, "layer"):
            means = [(name, found.mean(name, layer)) for name in MEASURES]
            cells = (percent(value, 0) if name in _SHARES else fixed(value, 3) for name, value in means)
            table.rows.append([f"{layer}", *cells])
        return [table]

    def draw(self, found: Alignment, path: FilePath, *, title: str) -> None:
        """Draw Fig. 3, one point a head, coloured by layer, and below it the relation pair by pair, by layer."""
        figure = blank(7.4)
        above, below = figure.subfigures(2, 1, height_ratios=[1.25, 1])
        _scatter(above, found)
        _pairs(below.subplots(1, 2), found)
        figure.suptitle(f"{title}, {found.tokens:,} tokens, {len(found.queries)} queries", fontsize=11)
        save(figure, path)


def backward(model: Any, ids: Tensor, first: int) -> tuple[list[Attended], Sequence[Tensor | None], float]:
    """Return the attention inputs of every layer in a pass over ``ids`` (1, tokens), the gradient of the loss by each
    layer's output (None without a gradient), and the mean loss of a token. The loss is that of the tokens after token
    ``first``, because earlier predictions do not depend on later outputs."""
    seen: list[Attended] = []

    def see(attended: Attended) -> None:
        if not attended.output.requires_grad:
            attended.output.requires_grad_()
        seen.append(attended)

    with torch.enable_grad(), watching(see):
        kept = torch.arange(first, ids.shape[1], device=ids.device)
        logits = model(ids, use_cache=False, logits_to_keep=kept).logits[0, :-1]
        loss = F.cross_entropy(logits.float(), ids[0, first + 1 :], reduction="sum")
        gradients = torch.autograd.grad(loss, [attended.output for attended in seen], allow_unused=True)
    return seen, gradients, float(loss.detach()) / (ids.shape[1] - first - 1)


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
        convex, convex_closed = ((weights >= 0) & (weights <= 1) for weights in (wanted, got))
        both = convex & convex_closed
        means = [float(part.mean()) for part in (a, b, c, a.abs())]
        shares = (agree, agree[like >= like.quantile(1 - SIMILAR_SHARE)], convex, convex_closed)
        gaps = [_finite((wanted - other)[both].abs().mean()) for other in (got, 0.5)]
        found = (*means, *(_correlation(a, other) for other in (c, -b)), *(_mean(part) for part in shares), *gaps)
        measures: dict[str, Any] = dict(zip(MEASURES, found, strict=True))
        rows.append(Head(attended.layer, head, kind, len(a), **measures))
    return rows


def _mean(flags: Tensor) -> float:
    return float(flags.double().mean())


def _correlation(a: Tensor, b: Tensor) -> float | None:
    return _finite(torch.corrcoef(torch.stack([a, b]))[0, 1]) if len(a) > 1 else None


def _finite(value: Tensor) -> float | None:
    return float(value) if value.isfinite() else None


def _scatter(part: Any, found: Alignment) -> None:
    above, points = part.subplots(1, 3), None
    layers = [row.layer for row in found.rows]
    for axes, (x, y, sign) in zip(above, (("11", "12", -1), ("11", "22", 1), ("12", "22", -1)), strict=True):
        across, up = ([getattr(row, f"cos{name}") for row in found.rows] for name in (x, y))
        points = axes.scatter(across, up, c=layers, cmap="viridis", s=12)
        reach = 1.05 * max(map(abs, across + up))
        axes.plot([-reach, reach], [-sign * reach, sign * reach], color="0.5", linewidth=0.8, linestyle="--")
        dress(axes, f"cos(E, c{y}), mean of each head", f"cos(E, c{x})")
    part.colorbar(points, ax=above, label="layer", pad=0.01)


def _pairs(below: Any, found: Alignment) -> None:
    order = each(found.rows, "layer")
    lines = (
        (below[0], "corr22", "correlation of cos(E, c11), cos(E, c22)", 1),
        (below[0], "corr12", "correlation of cos(E, c11), -cos(E, c12)", 1),
        (below[1], "agree", "signs as in Eq. 32", 100),
        (below[1], "agree_alike", "the same, quarter with the most similar keys", 100),
    )
    for place, (axes, measure, label, scale) in enumerate(lines):
        means = [found.mean(measure, layer) for layer in order]
        axes.plot(order, [None if value is None else scale * value for value in means], **styled(place, label, 3.5))
    below[0].axhline(1, color="0.5", linewidth=0.8, linestyle="--")
    below[0].set_ylim(min(0, *below[0].get_ylim()), 1.05)
    below[1].axhline(50, color="0.5", linewidth=0.8, linestyle=":")
    below[1].set_ylim(0, 100)
    titles = "pair by pair: 1 is what Eq. 32 says", "share of pairs, % (dotted: by chance)"
    for axes, words in zip(below, titles, strict=True):
        dress(axes, words, "layer")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
