"""Tokens that were not heavy hitters and are needed after all: KVReviver's Fig. 2, "Rethinking Token Sparsity".

The text's first half is a prompt, after which each KV head has its heavy hitters, a share of the tokens; none is one
for being recent, as in the paper. The second half's queries then read with the whole cache. A token is *active* for a
query that pays it more than a threshold (the paper's 0.5 %) of its attention: the mean of the KV head's query heads,
which is also what heavy hitters accumulate. Who the heavy hitters are:

    h2o         the most attention from all of the prompt's queries
    snapkv      the most from its last 32, each pooled with its 3 neighbours on either side (the largest)
    foresight   the most from the queries to come: what no rule can know, and the least that this measure can give

Layers with a sliding window forget by themselves and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.binding import bind
from kvkeep.models.watching import Attended, watching

THRESHOLD = 0.005
RATIOS = (0.1, 0.2, 0.4)
RULES = ("h2o", "snapkv", "foresight")
WINDOW, KERNEL = 32, 7


@dataclass(frozen=True)
class Row:
    """One layer, one rule and one share of heavy hitters; means over KV heads.

    others: tokens of the prompt that are not heavy hitters. reactivated: the share of them that some later query
    makes active. activations: how many queries do, the mean over the others. missed: the share of all activations of
    the prompt's tokens that are of others. mass: the share of its attention to the prompt that a query pays to
    others, mean. by_distance: of pairs of a query and one of the others as far apart as
    :data:`Reactivation.distances` says, the share that is active; None where there are no pairs.
    """

    layer: int
    rule: str
    ratio: float
    others: int
    reactivated: float
    activations: float
    missed: float
    mass: float
    by_distance: list[float | None]


@dataclass(frozen=True)
class Reactivation:
    """All rows. distances: the least and the most tokens from a query back to a token, by bin. active: by layer, how
    many of the prompt's tokens a query makes active, mean."""

    tokens: int
    prompt: int
    threshold: float
    ratios: list[float]
    distances: list[tuple[int, int]]
    active: dict[int, float]
    rows: list[Row]

    def mean(self, rule: str, ratio: float, measure: str) -> float:
        """Return the mean of a measure over layers."""
        return fmean(getattr(row, measure) for row in self.rows if (row.rule, row.ratio) == (rule, ratio))

    def at_distance(self, rule: str, ratio: float) -> list[float | None]:
        """Return ``by_distance``, the mean over layers."""
        mine = [row.by_distance for row in self.rows if (row.rule, row.ratio) == (rule, ratio)]
        found = [[value for value in column if value is not None] for column in zip(*mine, strict=True)]
        return [fmean(column) if column else None for column in found]


def reactivation(
    model: Any,
    ids: Tensor,
    *,
    threshold: float = THRESHOLD,
    ratios: Sequence[float] = RATIOS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Reactivation:
    """Read ``ids`` (1, tokens) once and look at every layer that sees all of it. Raises UsageError for a threshold or
    ratio out of (0, 1) or a text that is too short, UnsupportedModelError for a model without such layers."""
    tokens = ids.shape[1]
    for name, value in (("threshold", threshold), *(("ratio", ratio) for ratio in ratios)):
        if not 0 < value < 1:
            raise UsageError(f"A {name} is a share between 0 and 1, not {value:g}.")
    if tokens < 16 or not ratios:
        raise UsageError(f"A text of {tokens} tokens is too short to see what becomes of its half; give at least 16.")
    decoder = bind(model).decoder
    geometry = ModelGeometry.from_config(model.config)
    full = {layer.index for layer in geometry.layers if geometry.layers[layer.source].kind == "full"}
    if not full:
        raise UnsupportedModelError(
            f"'{geometry.model_type}' has no layer that sees the whole text: windows forget by themselves."
        )
    prompt = tokens // 2
    bins = _bins(tokens)
    rows: list[Row] = []
    active: dict[int, float] = {}

    def see(attended: Attended) -> None:
        if attended.layer in full:
            half = torch.arange(tokens, device=attended.query.device).split([prompt, tokens - prompt])
            before, after = (_by_kv_head(attended, part) for part in half)
            rows.extend(
                Row(attended.layer, rule, ratio, **measured)
                for rule, ratio, measured in measure(before, after, threshold, ratios, bins)
            )
            active[attended.layer] = float((after[..., :prompt] > threshold).float().sum(-1).mean())
            progress(len(active), len(full))

    with torch.no_grad(), watching(see):
        decoder(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    return Reactivation(tokens, prompt, threshold, list(ratios), bins, active, rows)


def measure(
    before: Tensor, after: Tensor, threshold: float, ratios: Sequence[float], bins: Sequence[tuple[int, int]]
) -> list[tuple[str, float, dict[str, Any]]]:
    """Return what :class:`Row` holds, by rule and ratio, for the attention of the prompt's queries, ``before``
    (kv_heads, prompt, tokens), and of the later ones, ``after`` (kv_heads, later, tokens)."""
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
            others = torch.ones_like(scores, dtype=torch.bool).scatter_(
                1, order[:, :count], False
            )  # (kv_heads, prompt)
            needed = active & others[:, None]
            each = others[:, None].expand_as(active)
            pairs = torch.bincount(of_bin[each], minlength=len(bins)).tolist()
            hits = torch.bincount(of_bin[needed], minlength=len(bins)).tolist()
            number = prompt - count
            shares = {
                "others": number,
                "reactivated": float(needed.any(1).sum(-1).double().mean()) / number,
                "activations": float(needed.sum((1, 2)).double().mean()) / number,
                "missed": float(needed.sum() / active.sum().clamp(min=1)),
                "mass": float((paid * others[:, None]).sum(-1).div(paid.sum(-1).clamp(min=1e-30)).mean()),
                "by_distance": [hit / pair if pair else None for hit, pair in zip(hits, pairs, strict=True)],
            }
            found.append((rule, ratio, shares))
    return found


def _scores(before: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Return what each rule goes by, (kv_heads, prompt)."""
    votes = before[:, -WINDOW:].sum(1)
    return {
        "h2o": before.sum(1),
        "snapkv": F.max_pool1d(votes, KERNEL, 1, KERNEL // 2),
        "foresight": after.sum(1),
    }


def _by_kv_head(attended: Attended, queries: Tensor) -> Tensor:
    """Return the attention that queries pay, mean over the query heads of each KV head: (kv_heads, queries,
    tokens)."""
    weights = attended.weights(queries)[0]
    return weights.view(attended.key.shape[1], -1, *weights.shape[1:]).mean(1)


def _bins(tokens: int) -> list[tuple[int, int]]:
    """Return distances 1-16, 17-32, 33-64, ... up to what the text has."""
    bins = [(1, 16)]
    while bins[-1][1] < tokens - 1:
        bins.append((bins[-1][1] + 1, 2 * bins[-1][1]))
    return bins
