"""``bounds``: the tightness of the bounds by which selective recall chooses pages and certifies entries.

The minimum and maximum of every key channel bound the scores of a page's keys (Quest, arXiv:2406.10774): s_k = scaling
q·k <= u = scaling sum_i max(q_i min_i, q_i max_i). The *excess* is u minus the largest true score. With lse, the
log-sum-exp of all scores of a query, the bound allows n keys a share of n exp(u - lse) of the query's attention. Their
true share is the sum of exp(s_k - lse).

Codes of keys bound the score of each entry (:mod:`kvkeep.stores.readers.code_bounds`). ``certified`` recalls entries
until the others provably have at most a share of the attention. An *oracle*, which knows the scores, needs fewer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.policies.recalls.certified import Certified
from kvkeep.stores.evicted.groups import GROUP
from kvkeep.stores.readers.code_bounds import CodeBounds, group_of_codes
from kvkeep_lab.attention_inputs import Attended
from kvkeep_lab.figures import COLOURS, FilePath, dress, panels, styled
from kvkeep_lab.reading import watch
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import LEAST, Count, Flag, Share, TextStudy, Trial, rising
from kvkeep_lab.tables import Table, fixed, percent
from kvkeep_lab.timing import TimingCase, run

Width = Annotated[Literal[2, 4, 8], BeforeValidator(int)]
"""Bits of a code."""


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
class RecalledRow:
    """One layer and one width of codes; means over the last queries and KV heads."""

    layer: int
    bits: int
    """Bits of a code; 0: the oracle."""
    recalled: float
    """Entries that a KV head recalls for a query."""
    code_bytes: float
    """The bytes of the codes of all keys as a share of the bytes of all entries."""
    code_products: float
    """The products of queries and codes as a share of the products of attention to all entries."""


@dataclass(frozen=True)
class Looseness:
    """All rows."""

    tokens: int
    queries: int
    """Number of last tokens whose queries are used. The pages consist of the tokens before them."""
    share: float
    """Share of the attention above which a page counts."""
    rows: list[BoundsRow]
    recalled: list[RecalledRow]
    steps_ms: list[float]
    """Median milliseconds of a step of kv-direct with :data:`LEAST` and with :attr:`tokens` entries; empty: not
    measured."""

    @property
    def attending(self) -> float:
        """The share of a step of kv-direct that grows with the number of old entries."""
        few, many = self.steps_ms
        return max(0.0, 1 - few / many)

    @property
    def bits(self) -> list[int]:
        """The widths of codes in rising order; 0 is the oracle."""
        return sorted({row.bits for row in self.recalled})

    def entries(self, bits: int) -> float:
        """Return the mean number of entries recalled by codes of ``bits`` bits; 0: by the oracle."""
        return fmean(row.recalled for row in where(self.recalled, bits=bits))

    def mean(self, page: int, measure: str) -> float:
        """Return the mean of a measure over layers."""
        return fmean(getattr(row, measure) for row in where(self.rows, page=page))

    @property
    def pages(self) -> list[int]:
        """The sizes of pages in rising order."""
        return sorted({row.page for row in self.rows})


class BoundsStudy(TextStudy):
    """The attention that certified recall could omit with exact scores."""

    name = "bounds"
    about = (
        "measure how far the bound of a page exceeds its largest score, and how many pages it cannot rule out, "
        "by page size"
    )
    protocol = (
        "The model reads a passage once. For its last queries, the minimum and the maximum of each channel bound "
        "the score of every page of earlier keys. The study compares this bound with the largest score of the "
        "page, and the attention that the page may have with the attention that it has. Codes of these keys bound "
        "the score of every entry. The study counts the entries that certified recalls so that the others provably "
        "have at most the share, and those that the true scores call for. Figures are means over full layers, "
        "heads, queries and pages."
    )
    found = Looseness

    tokens: Annotated[int, Flag("--limit")] = Field(
        2048, ge=LEAST, description="number of tokens to read from the text"
    )
    pages: Annotated[list[Count], rising] = Field([2, 4, 8, 16, 32, 64], min_length=1, description="slots of a page")
    bits: list[Width] = Field([2, 4, 8], min_length=1, description="bits of a code of a key")
    queries: int = Field(64, ge=1, description="number of queries, taken from the last tokens")
    share: Share = Field(0.01, description="share of the attention above which a page counts")
    steps: int = Field(
        0,
        ge=0,
        description="steps of kv-direct to time with few and with all tokens, for the most that certified saves",
    )

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
        recalled: list[RecalledRow] = []

        def observe(attended: Attended) -> None:
            for page in self.pages:
                rows.append(BoundsRow(attended.layer, page, *loose(attended, self.queries, page, self.share)))
            for bits in (0, *self.bits):
                count = certified(attended, self.queries, bits, self.share)
                recalled.append(RecalledRow(attended.layer, bits, count, *beside(attended, bits)))

        watch(trial.model, ids, observe, trial.progress)
        steps_ms = self._timed(trial, tokens) if self.steps else []
        return Looseness(tokens, self.queries, self.share, rows, recalled, steps_ms)

    def _timed(self, trial: Trial, tokens: int) -> list[float]:
        clock = "processor" if trial.model.device.type == "cpu" else "wall"
        cases = [TimingCase(f"{count}", count, "kv-direct", {"budget": LEAST}) for count in (LEAST, tokens)]
        found = run(trial.model, cases, rounds=2, steps=self.steps + 1, clock=clock, progress=trial.progress)
        return [row.step_ms for row in found if row.step_ms]

    def tables(self, found: Looseness) -> list[Table]:
        counts = f"more than {100 * found.share:g} % of the attention"
        table = Table(
            "Bounds by page, means over layers, heads, queries and pages",
            ["slots of a page", "bound above the largest true score", f"may have {counts}", "have as much"],
        )
        for page in found.pages:
            excess, may, have = (found.mean(page, name) for name in ("excess", "may", "have"))
            table.rows.append([f"{page}", fixed(excess, 1), percent(may), percent(have)])
        past, oracle = found.tokens - found.queries, found.entries(0)
        entries = Table(
            f"Entries of {past:,} that a KV head recalls, so that {100 * found.share:g} % of the attention is left out",
            ["chosen by", "entries", "of all", "times the oracle's"],
        )
        for bits in found.bits:
            count = found.entries(bits)
            by = f"codes of {bits} bits" if bits else "oracle"
            entries.rows.append([by, fixed(count, 0), percent(count / past), fixed(count / oracle, 2)])
        return [table, entries, *([self._saved(found)] if found.steps_ms else [])]

    def _saved(self, found: Looseness) -> Table:
        few, many = found.steps_ms
        table = Table(
            f"The most that certified can save of a step of kv-direct at {found.tokens:,} tokens",
            ["chosen by", "bytes of all", "saved at most", "products of all", "saved at most"],
            notes=[
                f"A step takes {few:.1f} ms with {LEAST} tokens and {many:.1f} ms with {found.tokens:,}: attention to "
                f"old entries is {percent(found.attending)} of it. Codes of all keys are read and multiplied in "
                "addition to the entries. Choosing and gathering entries is not counted."
            ],
        )
        for bits in found.bits:
            share, coded = found.entries(bits) / (found.tokens - found.queries), where(found.recalled, bits=bits)
            costs = (share + fmean(row.code_bytes for row in coded), share + fmean(row.code_products for row in coded))
            cells = (percent(part) for cost in costs for part in (cost, (1 - cost) * found.attending))
            table.rows.append([f"codes of {bits} bits" if bits else "oracle", *cells])
        return table

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


def certified(attended: Attended, queries: int, bits: int, share: float) -> float:
    """Return ``recalled`` of :class:`RecalledRow` for the last ``queries`` of a layer, whose own entries are resident.
    A KV head recalls for one query of each of its heads at a time."""
    keys, last_queries, scores = scored(attended, queries)
    past = scores.shape[2] - queries
    near = scores[..., past:].logsumexp(-1, keepdim=True)

    def by_step(part: Tensor) -> Tensor:
        return part.unflatten(1, (-1, queries)).transpose(1, 2).flatten(0, 1)[:, :, None]

    if bits:
        bounds = CodeBounds(bits)
        bounds.extend(keys[:, :past])
        upper, slack = (part(last_queries[:, None])[:, 0] * attended.scaling for part in (bounds.upper, bounds.slack))
        recalled = Certified(share).choose(by_step(upper - near), by_step(slack))
    else:
        recalled = fewest(by_step(scores[..., :past] - near), share)
    return float(recalled.sum(1).float().mean())


def beside(attended: Attended, bits: int) -> tuple[float, float]:
    """Return ``code_bytes`` and ``code_products`` of :class:`RecalledRow`."""
    if not bits:
        return 0.0, 0.0
    key_dim, elements = attended.key.shape[3], attended.key.shape[3] + attended.value.shape[3]
    return group_of_codes(key_dim, bits) / (elements * attended.key.itemsize * GROUP), key_dim / elements


def fewest(excess: Tensor, share: float) -> Tensor:
    """Return which entries an oracle recalls, (lanes, entries) bool: in falling order of their attention until the
    others have at most ``share`` of the attention of every query. excess: (lanes, heads, 1, entries), the logarithms of
    what entries add to the attention of the resident ones, which counts as 1."""
    total = torch.nn.functional.pad(excess, (0, 1)).logsumexp(3, keepdim=True)  # 1 is exp(0)
    parts = (excess - total).exp()
    order = parts.amax((1, 2)).argsort(dim=1)
    left = parts.gather(3, order[:, None, None].expand_as(parts)).cumsum(3)
    return torch.empty_like(order, dtype=torch.bool).scatter_(1, order, (left > share).any(2).any(1))


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
