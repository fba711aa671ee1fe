"""``reactivation``: tokens that are no heavy hitters but receive attention later (KVReviver's Fig. 2).

Attention is the mean over a KV head's query heads. As in the paper, recent tokens are not heavy hitters by default. The
rules for heavy hitters:

    h2o         the most attention from all of the prompt's queries
    snapkv      the most attention from its last 32 queries, max-pooled over 3 neighbours on either side
    foresight   the most attention from the later queries: the lower bound of this measure, which no rule can reach

Layers with a sliding window are left out, because they drop old entries themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvkeep_lab.attention_inputs import Attended
from kvkeep_lab.figures import FilePath, dress, panels, styled
from kvkeep_lab.reading import watch
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import LEAST, Flag, Share, TextStudy, Trial, rising
from kvkeep_lab.tables import Table, fixed, number, percent
from kvkeep_lab.tasks.base import Metric

RATIOS = (0.1, 0.2, 0.4)
RULES = ("h2o", "snapkv", "foresight")
WINDOW, KERNEL = 32, 7


@dataclass(frozen=True)
class ReactivationRow:
    """One layer, one rule and one share of heavy hitters; means over KV heads."""

    layer: int
    rule: str
    ratio: float
    """Share of heavy hitters."""
    others: int
    """Number of prompt tokens that are not heavy hitters."""
    reactivated: float
    """Share of the others that at least one later query makes active."""
    activations: float
    """Mean number of queries that make one of the others active."""
    missed: float
    """Share of the others in all activations of prompt tokens."""
    mass: float
    """Mean share of the others in a query's attention to the prompt."""
    by_distance: list[float | None]
    """Share of active pairs of a query and one of the others, by the bins of :attr:`Reactivation.distances`; None for a
    bin without pairs."""


@dataclass(frozen=True)
class Reactivation:
    """All rows."""

    tokens: int
    prompt: int
    threshold: float
    """Share of a query's attention above which a token is active."""
    ratios: list[float]
    distances: list[tuple[int, int]]
    """Minimum and maximum distance from a query back to a token, in tokens, by bin."""
    active: dict[int, float]
    """Mean number of prompt tokens that a query makes active, by layer."""
    rows: list[ReactivationRow]

    @property
    def rules(self) -> list[tuple[str, float]]:
        return each(self.rows, "rule", "ratio")

    def of(self, rule: str, ratio: float) -> list[ReactivationRow]:
        """Return the rows of a rule and a ratio, by layer."""
        return where(self.rows, rule=rule, ratio=ratio)

    def mean(self, rule: str, ratio: float, measure: str) -> float:
        """Return the mean of a measure over layers."""
        return fmean(getattr(row, measure) for row in self.of(rule, ratio))

    def at_distance(self, rule: str, ratio: float) -> list[float | None]:
        """Return the mean of ``by_distance`` over layers."""
        columns = zip(*(row.by_distance for row in self.of(rule, ratio)), strict=True)
        found = [[value for value in column if value is not None] for column in columns]
        return [fmean(column) if column else None for column in found]


class ReactivationStudy(TextStudy):
    """KVReviver's Fig. 2, on any text."""

    name = "reactivation"
    about = "measure how often tokens outside the heavy hitters become active later, by rule, ratio, layer and distance"
    protocol = (
        "The first half of a passage is a prompt, after which each KV head has its heavy hitters. The queries of "
        "the second half attend to the whole cache. A token is active for a query that gives it more than the "
        "threshold of its attention. Foresight: the heavy hitters of future queries, which no rule can know. "
        "Figures are means over full layers and KV heads."
    )
    found = Reactivation
    metrics: ClassVar[tuple[Metric, ...]] = tuple(
        Metric(f"{rule}_{ratio:g}", f"others that become active, {rule} at {ratio:g}", "lower")
        for rule, ratio in product(RULES, RATIOS)
    )

    tokens: Annotated[int, Flag("--limit")] = Field(
        1024, ge=LEAST, description="number of tokens to read from the text, half of them the prompt"
    )
    threshold: Share = Field(0.005, description="the share of its attention beyond which a query makes a token active")
    ratios: Annotated[list[Share], rising] = Field(
        list(RATIOS), min_length=1, description="shares of the prompt that are heavy hitters"
    )

    def measure(self, trial: Trial) -> Reactivation:
        ids = self.passage(trial)
        tokens, prompt = ids.shape[1], ids.shape[1] // 2
        bins = _bins(tokens)
        rows: list[ReactivationRow] = []
        active: dict[int, float] = {}

        def observe(attended: Attended) -> None:
            half = torch.arange(tokens, device=attended.query.device).split([prompt, tokens - prompt])
            before, after = (_by_kv_head(attended, part) for part in half)
            for rule, ratio, measured in reactivated(before, after, self.threshold, self.ratios, bins):
                rows.append(ReactivationRow(attended.layer, rule, ratio, **measured))
            active[attended.layer] = float((after[..., :prompt] > self.threshold).float().sum(-1).mean())

        watch(trial.model, ids, observe, trial.progress)
        return Reactivation(tokens, prompt, self.threshold, list(self.ratios), bins, active, rows)

    def scores(self, found: Reactivation) -> dict[str, float]:
        rules = [rule for rule in found.rules if rule[1] in RATIOS]
        return {f"{rule}_{ratio:g}": found.mean(rule, ratio, "reactivated") for rule, ratio in rules}

    def tables(self, found: Reactivation) -> list[Table]:
        even, headings = 1 / found.prompt, [f"{rule}, {ratio:g}" for rule, ratio in found.rules]
        table = Table(
            "Tokens that are no heavy hitters",
            ["heavy hitters", "become active", "queries each is active for", "of all activations", "of the attention"],
            notes=[
                f"An even share of the prompt's {found.prompt:,} tokens is {percent(even, 2)}, the threshold "
                f"{percent(found.threshold, 2)}. The paper prints a figure without numbers."
            ],
        )
        for heading, rule in zip(headings, found.rules, strict=True):
            shares = [percent(found.mean(*rule, name)) for name in ("reactivated", "missed", "mass")]
            table.rows.append([heading, shares[0], number(found.mean(*rule, "activations")), *shares[1:]])
        distances = Table("Active, of pairs of a query and another token, by distance", ["tokens back", *headings])
        columns = [found.at_distance(*rule) for rule in found.rules]
        for (low, high), *cells in zip(found.distances, *columns, strict=True):
            distances.rows.append([f"{low:,}-{high:,}", *(percent(cell, 2) for cell in cells)])
        return [table, distances]

    def details(self, found: Reactivation) -> list[Table]:
        headings = [f"{rule}, {ratio:g}" for rule, ratio in found.rules]
        table = Table(
            "Others that become active, by layer",
            ["layer", *headings, "active tokens a query"],
            notes=[
                f"A query makes {fmean(found.active.values()):.1f} of the {found.prompt:,} tokens active, on average."
            ],
        )
        shares = {(row.layer, row.rule, row.ratio): row.reactivated for row in found.rows}
        for layer, active in found.active.items():
            cells = (percent(shares[layer, *rule], 0) for rule in found.rules)
            table.rows.append([f"{layer}", *cells, fixed(active, 1)])
        return [table]

    def draw(self, found: Reactivation, path: FilePath, *, title: str) -> None:
        title = f"{title}, {found.tokens:,} tokens; active: above {100 * found.threshold:g} % of a query's attention"
        ratio = found.ratios[len(found.ratios) // 2]
        with panels(path, title, 3, 4.6) as (left, middle, right):
            for place, rule in enumerate(each(found.rows, "rule")):
                style, ratios = styled(place), [100 * each for each in found.ratios]
                for name, line, label in (("reactivated", "-", rule), ("missed", ":", None)):
                    shares = [100 * found.mean(rule, each, name) for each in found.ratios]
                    left.plot(ratios, shares, line, **style, label=label)
                rows = found.of(rule, ratio)
                middle.plot([row.layer for row in rows], [100 * row.reactivated for row in rows], **style, label=rule)
                rates = zip(found.distances, found.at_distance(rule, ratio), strict=True)
                shown = [((low + high) / 2, 100 * rate) for (low, high), rate in rates if rate]
                if shown:
                    right.plot(*zip(*shown, strict=True), **style, label=rule)
            dress(left, "become active, %; dotted: activations", "heavy hitters, % of the prompt", y=0, legend=True)
            dress(middle, f"tokens that become active, %, at {100 * ratio:g} %", "layer", y=0, legend=True)
            dress(right, f"active, % of pairs, at {100 * ratio:g} %", "tokens back", x="log2", y="log", legend=True)


def reactivated(
    before: Tensor, after: Tensor, threshold: float, ratios: Sequence[float], bins: Sequence[tuple[int, int]]
) -> list[tuple[str, float, dict[str, Any]]]:
    """Return the measures of :class:`ReactivationRow` by rule and ratio. ``before``: attention of the prompt's queries,
    (kv_heads, prompt, tokens). ``after``: attention of the later queries, (kv_heads, later, tokens)."""
    prompt, later = before.shape[1], after.shape[1]
    paid = after[..., :prompt]
    active = paid > threshold
    device = after.device
    distance = prompt + torch.arange(later, device=device)[:, None] - torch.arange(prompt, device=device)
    edges = torch.tensor([high for _, high in bins], device=device)
    of_bin = torch.bucketize(distance, edges).expand_as(active)
    found = []
    for rule, scores in _scores(before[..., :prompt], paid).items():
        order = scores.argsort(-1, descending=True)
        for ratio in ratios:
            count = max(1, round(ratio * prompt))
            others = torch.ones_like(scores, dtype=torch.bool)
            others = others.scatter_(1, order[:, :count], False)[:, None]  # (kv_heads, 1, prompt)
            needed, all_of = active & others, others.expand_as(active)
            pairs, hits = (torch.bincount(of_bin[part], minlength=len(bins)).tolist() for part in (all_of, needed))
            rest = prompt - count
            shares = {
                "others": rest,
                "reactivated": float(needed.any(1).sum(-1).double().mean()) / rest,
                "activations": float(needed.sum((1, 2)).double().mean()) / rest,
                "missed": float(needed.sum() / active.sum().clamp(min=1)),
                "mass": float((paid * others).sum(-1).div(paid.sum(-1).clamp(min=1e-30)).mean()),
                "by_distance": [hit / pair if pair else None for hit, pair in zip(hits, pairs, strict=True)],
            }
            found.append((rule, ratio, shares))
    return found


def _scores(before: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Return the score of each rule, (kv_heads, prompt)."""
    votes = before[:, -WINDOW:].sum(1)
    return {
        "h2o": before.sum(1),
        "snapkv": F.max_pool1d(votes, KERNEL, 1, KERNEL // 2),
        "foresight": after.sum(1),
    }


def _by_kv_head(attended: Attended, queries: Tensor) -> Tensor:
    """Return the attention weights of queries, the mean over the query heads of each KV head: (kv_heads, queries,
    tokens)."""
    weights = attended.weights(queries)[0]
    return weights.view(attended.key.shape[1], -1, *weights.shape[1:]).mean(1)


def _bins(tokens: int) -> list[tuple[int, int]]:
    """Return the distances 1-16, 17-32, 33-64, ... up to the length of the text."""
    bins = [(1, 16)]
    while bins[-1][1] < tokens - 1:
        bins.append((bins[-1][1] + 1, 2 * bins[-1][1]))
    return bins
