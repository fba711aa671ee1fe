"""Residuals of past tokens on their way up through the model's layers, one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import Piece
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter
from kvkeep.memory.rows import Buffer
from kvkeep.models.adapter import Adapter


class Replay:
    """``hidden`` (batch, slots, hidden_size) enters layer ``layer``. windows: the sliding window of each layer, None
    where it sees all tokens.

    A layer runs over the residuals in place, in chunks of ``page`` rows, its MLP included. The workspace therefore is
    the residuals, this layer's keys and values, and the activations of one chunk.
    """

    def __init__(
        self,
        adapter: Adapter,
        ledger: Ledger,
        meter: Meter,
        windows: Sequence[int | None],
        page: int,
        layer: int,
        hidden: Tensor,
    ) -> None:
        self.adapter, self.ledger, self.meter, self.windows, self.page = adapter, ledger, meter, windows, page
        self.layer, self.hidden = layer, hidden

    def advance(self) -> Iterator[Piece]:
        """Run one layer over the residuals; then yield its keys and values."""
        layer, hidden = self.layer, self.hidden
        stop = hidden.shape[1]
        scratch = _Scratch(stop, self.ledger.visible, self.windows[layer])
        for low in range(0, stop, self.page):
            rows = hidden[:, low : low + self.page]
            _, positions = self.ledger.span(low, low + rows.shape[1])
            hidden[:, low : low + self.page] = self.adapter.advance(layer, rows, positions, scratch)
        self.layer += 1
        keys, values = scratch.keys.view(), scratch.values.view()
        with self.meter.holding(scratch.keys.data, scratch.values.data):
            yield Piece(keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None], formed=True)


class _Scratch:
    """The cache of one layer that runs over past tokens: full, causal, with the layer's window."""

    def __init__(self, slots: int, visible: Tensor | None, window: int | None) -> None:
        self.keys, self.values = Buffer(slots), Buffer(slots)
        self.visible, self.window = visible, window
        self.heads = 0

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.heads = keys.shape[1]
        self.keys.append(keys)
        self.values.append(values)
        return keys, values

    def attends(self, layer_idx: int) -> bool:
        return True

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        step = AttentionInputs.of(module, query, key, value, None, scaling, self.heads, True, True)
        stop, queries = self.keys.length, step.queries
        first = stop - queries
        low = max(0, first - self.window + 1) if self.window is not None else 0
        segments = []
        if low < first:
            past = (part.view(low, first).flatten(0, 1)[:, None] for part in (self.keys, self.values))
            segments.append(Segment(*step.expanded(*past), self._mask(first, queries, low, first)))
        new = step.arriving()
        if (seen := self._mask(first, queries, first, stop)) is not None:
            rows = torch.arange(queries, device=query.device)
            new = Segment(new.key, new.value, seen & (rows <= rows[:, None]))
        segments.append(new)
        origin = torch.tensor([-low]) if low else None
        if self.visible is not None:
            origin = self.visible.int().argmax(1).repeat_interleave(self.heads) - low
        return step.unfolded(attend(step.query, segments, scaling, step.sinks, origin)[0])

    def _mask(self, first_query: int, queries: int, start: int, stop: int) -> Tensor | None:
        """Return which of the slots ``start``..``stop`` the queries at slots ``first_query``.. see, (lanes or 1, 1,
        queries, slots) bool. None: every query sees all of them."""
        mask: Tensor | None = None
        if self.visible is not None:
            mask = self.visible[:, None, None, start:stop].expand(-1, 1, queries, -1).repeat_interleave(self.heads, 0)
        if self.window is not None and start <= first_query + queries - 1 - self.window:
            asking = torch.arange(first_query, first_query + queries, device=self.keys.view().device)
            near = torch.arange(start, stop, device=asking.device)[None, :] > asking[:, None] - self.window
            mask = near[None, None] if mask is None else mask & near
        return mask
