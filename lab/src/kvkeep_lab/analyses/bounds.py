"""How loose the bounds of pages are: what certified recall could leave out, if it knew.

For each page of slots the minimum and maximum of every key channel bound the scores of its keys (Quest,
arXiv:2406.10774):

    s_k = scaling q·k <= u = scaling sum_i max(q_i min_i, q_i max_i)

The *excess* is u less the largest true score of the page. By the bound alone, a page of n keys may have up to
n exp(u - lse) of a query's attention, with lse the log-sum-exp of all its scores; what it has is the sum of
exp(s_k - lse).
Layers with a sliding window recall nothing and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.binding import bind
from kvkeep.models.watching import Attended, watching

PAGES = (2, 4, 8, 16, 32, 64)
SHARE = 0.01


@dataclass(frozen=True)
class Row:
    """One layer and one size of pages; means over the last queries, heads and pages. excess: of the bound, in scores as
    softmax takes them. may, have: the share of pages that by their bound may have, and that have, more than
    :data:`Looseness.share` of a query's attention."""

    layer: int
    page: int
    excess: float
    may: float
    have: float


@dataclass(frozen=True)
class Looseness:
    """All rows. queries: how many of the last tokens asked; the pages are of the tokens before them."""

    tokens: int
    queries: int
    share: float
    rows: list[Row]

    def mean(self, page: int, measure: str) -> float:
        """Return the mean of a measure over layers."""
        return fmean(getattr(row, measure) for row in self.rows if row.page == page)

    @property
    def pages(self) -> list[int]:
        """The sizes of pages, rising."""
        return sorted({row.page for row in self.rows})


def looseness(
    model: Any,
    ids: Tensor,
    *,
    pages: Sequence[int] = PAGES,
    queries: int = 64,
    share: float = SHARE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Looseness:
    """Read ``ids`` (1, tokens) once and look at every layer that sees all of it. Raises UsageError for pages that the
    text does not fill or a share out of (0, 1), UnsupportedModelError for a model without such layers."""
    tokens = ids.shape[1]
    if not pages or min(pages) < 1 or queries < 1 or tokens - queries < max(pages, default=1):
        raise UsageError(
            f"A text of {tokens} tokens has no page of {max(pages, default=1)} before its last {queries}; "
            "give a longer one."
        )
    if not 0 < share < 1:
        raise UsageError(f"A share of attention is between 0 and 1, not {share:g}.")
    decoder = bind(model).decoder
    geometry = ModelGeometry.from_config(model.config)
    full = {layer.index for layer in geometry.layers if geometry.layers[layer.source].kind == "full"}
    if not full:
        raise UnsupportedModelError(
            f"'{geometry.model_type}' has no layer that sees the whole text: nothing is recalled."
        )
    rows: list[Row] = []

    def see(attended: Attended) -> None:
        if attended.layer in full:
            rows.extend(
                Row(attended.layer, page, *measure(attended, queries, page, share)) for page in sorted(set(pages))
            )
            progress(len({row.layer for row in rows}), len(full))

    with torch.no_grad(), watching(see):
        decoder(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    return Looseness(tokens, queries, share, rows)


def measure(attended: Attended, queries: int, page: int, share: float) -> tuple[float, float, float]:
    """Return excess, may and have of :class:`Row` for the last ``queries`` of a layer's attention."""
    tokens, kv_heads = attended.key.shape[2], attended.key.shape[1]
    last = torch.arange(tokens - queries, tokens, device=attended.key.device)
    keys = attended.key[0].float()  # (kv_heads, n, dim)
    asked = attended.query[0, :, last].float().unflatten(0, (kv_heads, -1)).flatten(1, 2)  # (kv_heads, rows, dim)
    scores = asked @ keys.transpose(1, 2) * attended.scaling
    seen = attended.visible(last)[0].expand(kv_heads, -1, -1)
    scores.masked_fill_(~seen.repeat(1, scores.shape[1] // queries, 1), float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    count = (tokens - queries) // page
    paged = keys[:, : count * page].unflatten(1, (count, page))
    low, high = paged.amin(2).transpose(1, 2), paged.amax(2).transpose(1, 2)
    upper = (asked.clamp(min=0) @ high + asked.clamp(max=0) @ low) * attended.scaling
    true = scores[..., : count * page].unflatten(-1, (count, page))
    return (
        float((upper - true.amax(-1)).mean()),
        float((upper + math.log(page) - lse > math.log(share)).float().mean()),
        float((true.logsumexp(-1) - lse > math.log(share)).float().mean()),
    )
