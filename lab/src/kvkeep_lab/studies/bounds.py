"""``bounds``: the tightness of the bounds by which the recall ``pages`` chooses pages.

The minimum and maximum of every key channel bound the scores of a page's keys (Quest, arXiv:2406.10774): s_k = scaling
q·k <= u = scaling sum_i max(q_i min_i, q_i max_i). The *excess* is u minus the largest true score. With lse, the
log-sum-exp of all scores of a query, the bound allows n keys a share of n exp(u - lse) of the query's attention. Their
true share is the sum of exp(s_k - lse).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep_lab.attention_inputs import Attended
from kvkeep_lab.figures import COLOURS, FilePath, dress, panels, styled
from kvkeep_lab.reading import watch
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import LEAST, Count, Flag, Share, TextStudy, Trial, rising
from kvkeep_lab.tables import Table, fixed, percent


@dataclass(frozen=True)
class BoundsRow:
    """One layer and one size of pages; means over the last queries, heads and pages."""

    layer: int
    page: int
    excess: float
    """Excess of the bound, in scores before softmax."""
    may: float
    """Share of pages whose bound allows more than :data:`Looseness.share` of a query's attention."""
    have: float
    """Share of pages that have more than :data:`Looseness.share` of a query's attention."""


@dataclass(frozen=True)
class Looseness:
    """All rows."""

    tokens: int
    queries: int
    """Number of last tokens whose queries are used. The pages consist of the tokens before them."""
    share: float
    """Share of the attention above which a page counts."""
    rows: list[BoundsRow]

    def mean(self, page: int, measure: str) -> float:
        """Return the mean of a measure over layers."""
        return fmean(getattr(row, measure) for row in where(self.rows, page=page))

    @property
    def pages(self) -> list[int]:
        """The sizes of pages in rising order."""
        return sorted({row.page for row in self.rows})


class BoundsStudy(TextStudy):
    """How many pages the bounds rule out, and how many could be."""

    name = "bounds"
    about = (
        "measure how far the bound of a page exceeds its largest score, and how many pages it cannot rule out, "
        "by page size"
    )
    protocol = (
        "The model reads a passage once. For its last queries, the minimum and the maximum of each channel bound "
        "the score of every page of earlier keys. The study compares this bound with the largest score of the "
        "page, and the attention that the page may have with the attention that it has. Figures are means over "
        "full layers, heads, queries and pages."
    )
    found = Looseness

    tokens: Annotated[int, Flag("--limit")] = Field(
        2048, ge=LEAST, description="number of tokens to read from the text"
    )
    pages: Annotated[list[Count], rising] = Field([2, 4, 8, 16, 32, 64], min_length=1, description="slots of a page")
    queries: int = Field(64, ge=1, description="number of queries, taken from the last tokens")
    share: Share = Field(0.01, description="share of the attention above which a page counts")

    def measure(self, trial: Trial) -> Looseness:
        """Measure every full layer in one pass over the passage. Raises UsageError if a page is longer than the
        passage."""
        ids = self.passage(trial)
        tokens, largest = ids.shape[1], max(self.pages)
        if tokens - self.queries < largest:
            raise UsageError(
                f"A text of {tokens} tokens has no page of {largest} before its last {self.queries}; give a longer one."
            )
        rows: list[BoundsRow] = []

        def observe(attended: Attended) -> None:
            for page in self.pages:
                rows.append(BoundsRow(attended.layer, page, *loose(attended, self.queries, page, self.share)))

        watch(trial.model, ids, observe, trial.progress)
        return Looseness(tokens, self.queries, self.share, rows)

    def tables(self, found: Looseness) -> list[Table]:
        counts = f"more than {100 * found.share:g} % of the attention"
        table = Table(
            "Bounds by page, means over layers, heads, queries and pages",
            ["slots of a page", "bound above the largest true score", f"may have {counts}", "have as much"],
        )
        for page in found.pages:
            excess, may, have = (found.mean(page, name) for name in ("excess", "may", "have"))
            table.rows.append([f"{page}", fixed(excess, 1), percent(may), percent(have)])
        return [table]

    def draw(self, found: Looseness, path: FilePath, *, title: str) -> None:
        """Draw the excess of the bounds (thin lines: layers), and the pages that they cannot exclude."""
        with panels(path, f"{title}, {found.tokens:,} tokens", 2, 4.2) as (left, right):
            for layer in each(found.rows, "layer"):
                rows = where(found.rows, layer=layer)
                pages, excess = [row.page for row in rows], [row.excess for row in rows]
                left.plot(pages, excess, color=COLOURS[0], alpha=0.15, linewidth=0.8)
            left.plot(found.pages, [found.mean(page, "excess") for page in found.pages], **styled(0, size=None))
            for place, (measure, label) in enumerate((("may", "by the bound may have"), ("have", "have"))):
                shares = [100 * found.mean(page, measure) for page in found.pages]
                right.plot(found.pages, shares, **styled(place, label, None))
            across, counts = "slots of a page", f"more than {100 * found.share:g} % of the attention"
            dress(left, "bound above the largest true score", across, x="log2", y=0)
            dress(right, f"pages with {counts}, %", across, x="log2", y=0, legend=True)


def loose(attended: Attended, queries: int, page: int, share: float) -> tuple[float, float, float]:
    """Return ``excess``, ``may`` and ``have`` of :class:`BoundsRow` for the last ``queries`` of a layer."""
    keys, last_queries, scores = scored(attended, queries)
    lse = scores.logsumexp(-1, keepdim=True)
    count = (scores.shape[2] - queries) // page
    paged = keys[:, : count * page].unflatten(1, (count, page))
    low, high = paged.amin(2).transpose(1, 2), paged.amax(2).transpose(1, 2)
    upper = (last_queries.clamp(min=0) @ high + last_queries.clamp(max=0) @ low) * attended.scaling
    true = scores[..., : count * page].unflatten(-1, (count, page))
    return (
        float((upper - true.amax(-1)).mean()),
        float((upper + math.log(page) - lse > math.log(share)).float().mean()),
        float((true.logsumexp(-1) - lse > math.log(share)).float().mean()),
    )


def scored(attended: Attended, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys of a layer, (kv_heads, n, dim), its last ``queries``, (kv_heads, heads * queries, dim), and their
    scores, (kv_heads, heads * queries, n), -inf where a key is not seen. All are float32."""
    tokens, kv_heads = attended.key.shape[2], attended.key.shape[1]
    last = torch.arange(tokens - queries, tokens, device=attended.key.device)
    keys = attended.key[0].float()
    last_queries = attended.query[0, :, last].float().unflatten(0, (kv_heads, -1)).flatten(1, 2)
    scores = last_queries @ keys.transpose(1, 2) * attended.scaling
    seen = attended.visible(last)[0].expand(kv_heads, -1, -1)
    return keys, last_queries, scores.masked_fill_(~seen.repeat(1, scores.shape[1] // queries, 1), float("-inf"))
