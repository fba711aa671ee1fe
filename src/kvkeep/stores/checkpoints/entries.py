"""Checkpoint kind ``kv``: unchanged keys and values of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvkeep.contracts.checkpoint import Checkpoint
from kvkeep.contracts.entries import Piece
from kvkeep.memory.meter import Meter
from kvkeep.memory.pages import PagedRows, RecentPages, pick_each
from kvkeep.memory.places import Place
from kvkeep.memory.rows import Ring, Rows, concatenated
from kvkeep.step import native
from kvkeep.step.plan import Destination, FullPages, JoinedSpans, Span
from kvkeep.stores.checkpoints.spec import CheckpointSpec


class EntryCheckpoint(Checkpoint):
    """A checkpoint of entries, (lanes, n, dim), in the order of their arrival, whatever their slots. beginning: whether
    it keeps the first block where its capacity is limited, so that :meth:`passages` finds it."""

    by_token = False
    copies = True
    replays = False

    def __init__(
        self,
        home: Place,
        device: torch.device,
        layers: Sequence[int],
        spec: CheckpointSpec,
        meter: Meter,
        page: int,
        beginning: bool = False,
    ) -> None:
        self.spec, self.home, self.capacity = spec, home, spec.capacity
        self.device, self.meter, self.page = device, meter, page
        self.in_place = device.type == "cpu" or spec.where == "device"
        self._full = {layer: FullPages() for layer in layers}

        def rows() -> Rows:
            if spec.capacity is None:
                return PagedRows(home)
            return RecentPages(spec.capacity, home) if beginning else Ring(spec.capacity, home)

        self._rows = {layer: (rows(), rows()) for layer in layers}

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for rows, new in zip(self._rows[layer], (keys, values), strict=True):
            rows.append(new)

    def adopt(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for rows, new in zip(self._rows[layer], (keys, values), strict=True):
            rows.adopt(new)

    def holds(self, layer: int, keys: Tensor) -> bool:
        return self._rows[layer][0].holds(keys)

    def rows(self, layer: int) -> tuple[Rows, Rows]:
        return self._rows[layer]

    def pieces(self, layer: int, stop: int, lazy: bool = False) -> Iterator[Piece]:
        """Yield views where the entries are in the device's memory, else copies of a page at a time. lazy: one piece
        has all entries, where the kernel reads pages."""
        keys, values = self._rows[layer]
        if lazy and (spans := self.spans(layer, stop)) and native.can_read(spans[0].keys, spans[0].values):
            yield Piece(joined := JoinedSpans(spans), joined.values)
            return
        for (start, key), (_, value) in zip(keys.read(keys.first, stop), values.read(values.first, stop), strict=True):
            if key.device == self.device:
                yield Piece(key[:, None], value[:, None], first=start)
                continue
            for low in range(0, key.shape[-2], self.page):
                window = slice(low, low + self.page)
                moved = key[:, None, window].to(self.device), value[:, None, window].to(self.device)
                with self.meter.holding(*moved):
                    yield Piece(*moved, first=start + low, formed=True)

    def spans(self, layer: int, stop: int) -> list[Span] | None:
        keys, values = self._rows[layer]
        if not keys.pages or stop <= keys.starts[-1] or keys.pages[0].device != self.device:
            return None
        full = self._full[layer].span(keys.pages[:-1], values.pages[:-1])
        last = Span(keys.pages[-1], values.pages[-1], 0, stop - keys.starts[-1])
        return [last] if full is None else [full, last]

    def next_row(self, layer: int) -> Destination | None:
        keys, values = (rows.next_row() for rows in self._rows[layer])
        return None if keys is None or values is None else Destination(keys[0], values[0], keys[1])

    def commit(self, layer: int) -> None:
        for rows in self._rows[layer]:
            rows.advance()

    def pick(self, layer: int, lane: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = pick_each(self._rows[layer], lane, slot)
        return keys.to(self.device), values.to(self.device)

    def between(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (lanes, n, dim) of the entries ``start`` to ``stop``: views where they lie in one page
        of the device's memory."""
        keys, values = (concatenated(rows, start, stop).to(self.device) for rows in self._rows[layer])
        return keys, values

    def passages(self, layer: int, numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (lanes, n, ``size``, dim) of blocks of ``size`` entries: ``numbers`` (lanes, n) counts
        them from 0, for each lane."""
        keys, values = (rows.passages(numbers, size).to(self.device) for rows in self._rows[layer])
        return keys, values

    def first(self, layer: int) -> int:
        return self._rows[layer][0].first

    def beginning(self, layer: int) -> int:
        beginning = self._rows[layer][0].beginning
        return 0 if beginning is None else beginning.length

    def length(self, layer: int) -> int:
        return self._rows[layer][0].length

    def truncate(self, layer: int, length: int) -> None:
        for rows in self._rows[layer]:
            rows.truncate(length)

    def select(self, index: Tensor, lanes: Callable[[int], Tensor]) -> None:
        for layer, pair in self._rows.items():
            for rows in pair:
                rows.select(lanes(layer))

    def stores(self) -> Iterator[tuple[str, Rows]]:
        for layer, (keys, values) in self._rows.items():
            yield f"keys.{layer}", keys
            yield f"values.{layer}", values
            if keys.beginning is not None and values.beginning is not None:
                yield f"first_keys.{layer}", keys.beginning
                yield f"first_values.{layer}", values.beginning
