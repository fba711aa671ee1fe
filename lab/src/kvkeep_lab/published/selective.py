"""The reader of selective recall: a step attends to the resident entries, and to chosen pages of the backing.

Attention over resident and new entries gives the log-sum-exp of their scores, and the bounds of a page
(:mod:`kvkeep_lab.published.page_bounds`) the most that any of its entries can score. Together they bound the attention
that a page can have, before it is recalled. The recall chooses the pages of each lane. The attention left out is
bounded by

    S / (1 + S),    S = sum over pages left out of  n exp(bound · scaling - lse)

with n the page's entries that are not resident and ``lse`` that of all entries attended exactly. If a store keeps
evicted entries in a smaller form, the step also attends to those that were not recalled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.part import Site
from kvkeep.memory.extent import Extent
from kvkeep.step.scores import scores_of
from kvkeep.stores.layer import Layer, observe_evicted
from kvkeep.stores.readers.backed import Backed
from kvkeep.stores.slots import compact
from kvkeep_lab.published.by_hand import away, bring, halves, picked
from kvkeep_lab.published.page_bounds import PAGE, Bounds

FEW = 8
"""The maximum number of queries for which pages are chosen; a longer step recalls all pages."""


@dataclass(frozen=True)
class Certificate:
    """Bounds on the attention that one layer left out."""

    layer: int
    last: float
    """The largest bound on a query's attention to entries left out, over the queries of the last step."""
    worst: float
    """The same over all steps."""
    recalled: float
    """Entries of one KV head of one row recalled in a step: the mean over steps of few queries."""
    away: float
    """Entries of one KV head of one row that could be recalled: the mean over the same steps."""


class Selective(Backed):
    """Recalls the pages that ``recall`` chooses (a
    :class:`~kvkeep_lab.published.selective_recall.SelectiveRecall`), in steps of at most :data:`FEW` queries. It
    recalls all pages in longer steps, where the caller has a mask, and for latent attention (bounds of latents do not
    bound scores)."""

    def __init__(self, site: Site, recall: Any) -> None:
        super().__init__(site)
        self.choice, self.bounds = recall, Bounds()
        self.meter = site.meter
        self.last = self.worst = 0.0
        self._recalled = self._away = 0.0
        self._steps = 0

    @property
    def certificate(self) -> Certificate:
        steps = max(1, self._steps)
        return Certificate(self.index, self.last, self.worst, self._recalled / steps, self._away / steps)

    # -- a forward pass -----------------------------------------------------------------------------

    def attend(self, layer: Layer, step: AttentionInputs) -> Tensor:
        if step.brings_entries:
            self.last = 0.0
        wide = step.wide(layer.length)
        few = step.queries <= FEW and wide is None and not step.latent
        lost = self.first > 0
        if not few and not lost:
            return self.attend_exactly(layer, step)
        settled = few and layer.attends_settled(step)
        if settled:
            layer.settle()
        resident, store = layer.resident, layer.evicted
        resident_segments = [layer.segment(piece, step, wide) for piece in resident.pieces()]
        near = resident_segments if settled else [*resident_segments, step.arriving()]
        if few:
            output, lse, recalled = self._chosen_pages(layer, near, step)
        else:
            recalled = ~resident.resident_slots()
            recalled[:, : self.first] = False
            past = self.segments(layer, step, recalled, wide)
            output, lse = attend(step.query, chain(near, past), step.scaling, step.sinks)
        if lost:
            self._note(1.0)  # attention to lost entries has no bound
        evicted: list[Segment] = []
        if store.keeps:  # other entries are attended in their stored form
            keep = None if recalled is None else ~recalled
            pieces = store.pieces(step.query, resident, layer.length)
            evicted = [layer.segment(piece, step, wide, keep) for piece in pieces]
            if evicted:
                output, lse = attend(step.query, evicted, step.scaling, before=(output, lse))
        resident.observe(step, lse, resident_segments, None if settled else layer.pending, layer.length)
        if store.listens:
            observe_evicted(layer, step, lse, evicted)
        if step.last:
            layer.finish()
            if few and self.choice.fetches:
                self._fetch(layer, step, lse)
        return output

    def _chosen_pages(
        self, layer: Layer, near: list[Segment], step: AttentionInputs
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Attend over ``near`` and the recalled entries; note the bound on the rest. Return output, log-sum-exp, and
        the recalled slots, (lanes, slots) bool, or None."""
        output, lse = attend(step.query, near, step.scaling, step.sinks)
        there = self._away_by_page(layer)
        if there is None:
            return output, lse, None
        counts = there.unflatten(1, (-1, PAGE)).sum(2)
        bounds = scores_of(self.bounds.upper(step.query), step.scaling)
        bounds += counts.log()[:, None, None]
        wanted: Tensor | None = None
        if (taken := self.choice.choose(bounds - self._counted(layer, lse)[..., None])) is not None:
            wanted = (there & taken.repeat_interleave(PAGE, 1))[:, : layer.length]
            if wanted.any():
                chosen = self._recall(layer, step, wanted)
                output, lse = attend(step.query, chosen, step.scaling, before=(output, lse))
            bounds.masked_fill_(taken[:, None, None], float("-inf"))
        left = (bounds - self._counted(layer, lse)[..., None]).logsumexp(-1)
        self._note(float(left.sigmoid().max()))  # S / (1 + S), by log S
        if step.brings_entries:
            self._recalled += 0.0 if wanted is None else int(wanted.sum()) / len(there)
            self._away += int(counts.sum()) / len(there)
            self._steps += 1
        return output, lse, wanted

    def _fetch(self, layer: Layer, step: AttentionInputs, lse: Tensor) -> None:
        """Make entries that a step may have missed resident, for the next step."""
        there = self._away_by_page(layer)
        if there is None:
            return
        bounds = scores_of(self.bounds.upper(step.query), step.scaling)
        bounds = bounds.sub_(self._counted(layer, lse)[..., None]).amax((1, 2))
        first = layer.ledger.first_by(layer.heads)
        tokens = layer.length if first is None else (layer.length - first).clamp(min=1)
        bring(layer, self.choice.fetch(bounds, tokens, partial(halves, layer.resident), there))

    def _counted(self, layer: Layer, lse: Tensor) -> Tensor:
        """Return the log-sum-exp that pages are compared with, in which queries of padding do not count."""
        return layer.ledger.unpadded(lse.clamp(min=torch.finfo(lse.dtype).min), layer.heads)

    def _away_by_page(self, layer: Layer) -> Tensor | None:
        """Return which slots can come back, (lanes, slots of whole pages) bool; None where there are none."""
        if not layer.length:
            return None
        slots = away(layer)
        if not slots.any():
            return None
        return torch.nn.functional.pad(slots, (0, self.bounds.pages * PAGE - layer.length))

    def _recall(self, layer: Layer, step: AttentionInputs, wanted: Tensor) -> Iterator[Segment]:
        """Yield the ``wanted`` entries, (lanes, slots) bool. They are gathered; where some lane needs most of the
        backing, they are read in place and masked."""
        if int(wanted.sum(1).max()) > layer.length // 2:
            yield from self.segments(layer, step, wanted)
            return
        slots = compact(wanted)
        keys, values = picked(self, slots.clamp(min=self.first))  # a row with fewer has others, which are masked
        with self.meter.holding(keys, values):
            yield Segment(keys[:, None], values[:, None], (slots >= 0)[:, None, None])

    def _note(self, bound: float) -> None:
        self.last = max(self.last, bound)
        self.worst = max(self.worst, self.last)

    def settling(self, layer: Layer, keys: Tensor, values: Tensor, mapped: bool = False) -> None:
        super().settling(layer, keys, values, mapped)
        self.bounds.extend(keys)

    # -- the cache contract -------------------------------------------------------------------------

    def truncate(self, layer: Layer, length: int) -> None:
        super().truncate(layer, length)
        self.bounds.truncate(min(length, layer.length))

    def select(self, layer: Layer, lanes: Tensor) -> None:
        self.bounds.select(lanes)

    def state(self) -> dict[str, Tensor]:
        numbers = [self.last, self.worst, self._recalled, self._away, self._steps]
        return self.bounds.state() | {"certificate": torch.tensor(numbers, dtype=torch.float64)}

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        self.bounds.restore(state, length)
        self.last, self.worst, self._recalled, self._away, steps = state["certificate"].tolist()
        self._steps = int(steps)

    def check(self, extent: Extent) -> None:
        super().check(extent)
        self.bounds.check(extent)

    @property
    def bookkeeping_bytes(self) -> int:
        return self.bounds.nbytes


def certificates(cache: Any) -> list[Certificate]:
    """Return what each layer with a selective recall may have missed; an empty list for other methods."""
    layers = cache.stream.bounded if cache.stream.streams else []
    return [layer.reader.certificate for layer in layers if isinstance(layer.reader, Selective)]
