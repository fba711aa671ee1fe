"""``sketch-attention``: the effect of a count sketch's errors of keys and values on attention, compared with
KVReviver's estimates (main text and appendix E).

For scores A = q k s with errors dA, the weights p = softmax(A) have errors of variance

    Var(dp_i) = s_A^2 (p_i^2 (1 - p_i)^2 + sum_{j != i} p_j^2 p_i^2),    s_A^2 = s_q^2 s_k^2 a pi / N

to first order, where s_q^2 and s_k^2 are the variances of the elements of queries and keys, and a pi / N is the bound
of :mod:`kvkeep_lab.studies.sketch_error`. Lemma 3: with random signs the error of the output decouples into that of
the weights, J dA V, and that of the values, p dV, because the cross term J dA dV has a mean of 0. The lemma also states
that a value times a random sign has the variance of the value. This holds only for values with a mean of 0, because the
variance of the product is the mean square.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvkeep.models.binding import bind
from kvkeep.stores.evicted.sketch import ROWS, CountSketch, places
from kvkeep_lab.attention_inputs import Attended, grouped, watching
from kvkeep_lab.figures import FilePath, dress, panels, styled
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import LEAST, Count, Flag, TextStudy, Trial
from kvkeep_lab.tables import Table, number
from kvkeep_lab.tasks.base import Metric

NORMAL, PUBLISHED, SIGNED = "normal", "text, as published", "text, keys signed"
HEADS = 8
"""Number of heads of the normal vectors."""


@dataclass(frozen=True)
class Effects:
    """Mean squares over the queries of a layer and their entries, or over several layers. Those of outputs are relative
    to the mean square of the output o."""

    score: float
    """Mean square of dA, in nats."""
    score_bound: float
    """s_A^2 by the bound."""
    share: float
    """Mean square of the weights p."""
    weight: float
    """Mean square of dp."""
    weight_first: float
    """Mean square of dp by the formula, with the measured mean square of dA."""
    weight_bound: float
    """Mean square of dp by the formula, with the bound of dA."""
    output: float
    """Mean square of the error of o, which is the sum of dp v, p dv and dp dv."""
    by_weights: float
    """Mean square of dp v."""
    by_values: float
    """Mean square of p dv."""
    together: float
    """Mean square of dp dv."""
    linear: float
    """Mean square of J dA v."""


@dataclass(frozen=True)
class SketchRow:
    """Entries of one sort at one load, as the mean over layers."""

    sort: str
    load: float
    others: float
    """Mean number of other entries in an entry's slot."""
    effects: Effects

    @property
    def decoupled(self) -> float:
        """Ratio of the output's error to the sum of the two parts in Lemma 3, which gives 1."""
        return self.effects.output / (self.effects.by_weights + self.effects.by_values)


@dataclass(frozen=True)
class AttentionErrors:
    """All sorts and loads."""

    tokens: int
    queries: int
    rows: list[SketchRow]
    centred: float
    """Ratio of the mean square of the text's values to their variance over tokens (Lemma 3: 1)."""


class SketchAttention(TextStudy):
    """KVReviver's Var(dp) and Lemma 3, for normal vectors and for a model's attention."""

    name = "sketch-attention"
    about = "the error of attention weights and outputs with sketched keys and values, against KVReviver's estimates"
    protocol = (
        "All keys and values of a KV head are in a sketch of 3 rows; queries of the second half attend to what is "
        "estimated of them, all heads and layers: a passage's, as attention reads them, keys without signs (published) "
        "and with; and normal ones (the appendix's assumption). Mean squares over queries, entries and layers."
    )
    found = AttentionErrors
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("normal", "mean square of dp by the estimate, normal vectors, smallest load", "lower", "number"),
        Metric("normal_most", "the same, largest load", "lower", "number"),
        Metric("text", "mean square of dp by the estimate, text, smallest load", "lower", "number"),
        Metric("text_most", "the same, largest load", "lower", "number"),
        Metric("score", "size of dA in nats, text, smallest load", "lower", "number"),
        Metric(
            "decoupled", "error of the output by that of Lemma 3's two parts, text, smallest load", "lower", "number"
        ),
        Metric("decoupled_most", "the same, largest load", "lower", "number"),
        Metric("centred", "mean square of values by their variance", "lower", "number"),
    )

    tokens: Annotated[int, Flag("--limit")] = Field(
        1024, ge=LEAST, description="number of tokens to read from the text, and entries in the sketch"
    )
    loads: list[Annotated[float, Field(gt=0)]] = Field([1, 3, 12, 50], min_length=1, description="entries in a slot")
    queries: Count = Field(32, description="queries, over the second half")
    dim: int = Field(128, ge=1, description="of the normal vectors")

    @torch.no_grad()
    def measure(self, trial: Trial) -> AttentionErrors:
        bind(trial.model)
        seen: list[Attended] = []
        with watching(seen.append):
            trial.model(self.passage(trial), use_cache=False, logits_to_keep=1)
        draw = trial.seed or 0
        at = torch.linspace(self.tokens // 2, self.tokens - 1, self.queries).round().long().unique()
        shape, generator = (3, HEADS, self.tokens, self.dim), torch.Generator().manual_seed(draw)
        query, key, value = torch.randn(shape, generator=generator).unsqueeze(1)  # (1, heads, tokens, dim) each
        normal = Attended(0, query, key, value, None, self.dim**-0.5, query)
        sorts: dict[str, tuple[Sequence[Attended], bool]] = {
            NORMAL: ([normal], False), PUBLISHED: (seen, False), SIGNED: (seen, True)
        }  # fmt: skip
        rows: list[SketchRow] = []
        for sort, (layers, signed) in sorts.items():
            for load in self.loads:
                trial.progress(f"{sort}, load {load:g}", len(rows), len(sorts) * len(self.loads))
                slots = max(1, round(self.tokens / load))
                parts = [asdict(effects(layer, at.to(layer.key.device), slots, signed, draw)) for layer in layers]
                means = Effects(**{name: fmean(part[name] for part in parts) for name in parts[0]})
                rows.append(SketchRow(sort, load, (self.tokens - 1) / slots, means))
        squares = [
            (one.value[0].float().square().mean(), one.value[0].float().var(1, correction=0).mean()) for one in seen
        ]
        return AttentionErrors(self.tokens, len(at), rows, fmean(float(square / var) for square, var in squares))

    def scores(self, found: AttentionErrors) -> dict[str, float]:
        scores = {"centred": found.centred}
        for load, end in ((min(self.loads), ""), (max(self.loads), "_most")):
            by_sort = {row.sort: row for row in where(found.rows, load=load)}
            for name, sort in (("normal", NORMAL), ("text", PUBLISHED)):
                scores[f"{name}{end}"] = by_sort[sort].effects.weight / by_sort[sort].effects.weight_bound
            scores[f"decoupled{end}"] = by_sort[PUBLISHED].decoupled
            if not end:
                scores["score"] = math.sqrt(by_sort[PUBLISHED].effects.score)
        return scores

    def tables(self, found: AttentionErrors) -> list[Table]:
        weights = Table(
            f"Weights: {found.tokens:,} entries, {found.queries} queries a head; roots of mean squares",
            ["entries, load", "dA, nats", "by the bound", "p", "dp", "formula, measured dA", "formula, the bound's dA"],
            notes=["Formula: the root of Var(dp), which is of first order in dA; no weight can differ by more than 1."],
        )
        outputs = Table(
            "Outputs: mean squares of errors by that of the output",
            ["entries, load", "all", "dp v", "p dv", "dp dv", "all by the first two (Lemma 3: 1)", "J dA v"],
            notes=[f"Mean square of the text's values by their variance: {number(found.centred)} (Lemma 3: 1)."],
        )
        for row in found.rows:
            one, name = row.effects, f"{row.sort}, {row.load:g}"
            sizes = (one.score, one.score_bound, one.share, one.weight, one.weight_first, one.weight_bound)
            weights.rows.append([name, *(number(math.sqrt(size), 2) for size in sizes)])
            parts = (one.output, one.by_weights, one.by_values, one.together, row.decoupled, one.linear)
            outputs.rows.append([name, *(number(part, 2) for part in parts)])
        return [weights, outputs]

    def draw(self, found: AttentionErrors, path: FilePath, *, title: str) -> None:
        """Draw the error of weights with its estimate, and the error of outputs with its two parts, by load."""
        with panels(path, title, 2, 4.6) as (weights, outputs):
            for place, sort in enumerate(each(found.rows, "sort")):
                mine = where(found.rows, sort=sort)
                loads, style = [row.load for row in mine], styled(place, sort, None)
                weights.plot(loads, [math.sqrt(row.effects.weight) for row in mine], **style)
                bound = [math.sqrt(row.effects.weight_bound) for row in mine]
                weights.plot(loads, bound, color=style["color"], linewidth=1, linestyle=":")
                outputs.plot(loads, [row.effects.output for row in mine], **style)
                parts = [row.effects.by_weights + row.effects.by_values for row in mine]
                outputs.plot(loads, parts, color=style["color"], linewidth=1, linestyle=":")
            words = "root mean square of dp (dotted: by the estimate)", "error of outputs (dotted: of Lemma 3's parts)"
            for axes, label in zip((weights, outputs), words, strict=True):
                dress(axes, label, "load: entries that share a slot", x="log", y="log", legend=True)


def effects(layer: Attended, at: Tensor, slots: int, signed: bool, seed: int) -> Effects:
    """Return the effects of a sketch with ``slots`` slots on the attention of one layer's queries ``at`` (positions).
    ``signed``: whether keys have random signs. Values always have them."""
    heads = layer.query.shape[1]
    sketched = (
        _estimates(part[0].float(), slots, sign, seed) for part, sign in ((layer.key, signed), (layer.value, True))
    )
    keys, values = (grouped(part[None].float(), heads)[0] for part in (layer.key[0], layer.value[0]))
    keys_off, values_off = (
        grouped(part[None], heads)[0] - true for part, true in zip(sketched, (keys, values), strict=True)
    )
    query, seen = layer.query[0, :, at].float(), layer.visible(at)[0]  # (heads, queries, dim), (1, queries, n)
    scores = (query @ keys.transpose(1, 2) * layer.scaling).masked_fill(~seen, -math.inf)
    error = (query @ keys_off.transpose(1, 2) * layer.scaling).where(seen, 0)
    weights, noisy = scores.softmax(-1), (scores + error).softmax(-1)
    off, linear = noisy - weights, weights * (error - (weights * error).sum(-1, keepdim=True))
    pairs = int(seen.expand(heads, -1, -1).sum())
    score = float(error.square().sum()) / pairs
    # the paper's s_A^2; its scaling is 1 / sqrt(dim)
    per_element = float(layer.query[0].float().square().mean() * layer.key[0].float().square().mean())
    bound = per_element * layer.scaling**2 * keys.shape[-1] * math.pi * (layer.key.shape[2] - 1) / slots / ROWS
    squares = weights.square()
    first = float((squares * ((1 - weights).square() + squares.sum(-1, keepdim=True) - squares)).sum()) / pairs
    size = float((weights @ values).square().mean())
    parts = (noisy @ (values + values_off) - weights @ values, off @ values, weights @ values_off, off @ values_off)
    errors = [float(part.square().mean()) / size for part in (*parts, linear @ values)]
    share, weight = (float(part.square().sum()) / pairs for part in (weights, off))
    return Effects(score, bound, share, weight, score * first, bound * first, *errors)


def _estimates(vectors: Tensor, slots: int, signed: bool, seed: int) -> Tensor:
    """Return the median estimates of ``vectors`` (heads, n, dim) by a sketch of all of them."""
    heads, count, dim = vectors.shape
    at = places(torch.arange(count, device=vectors.device).expand(heads, -1), ROWS, slots, seed)
    sketch = CountSketch(heads, ROWS, slots, dim, signed, like=vectors)
    sketch.insert(at, vectors)
    return sketch.estimates(at).dense(torch.float32)
