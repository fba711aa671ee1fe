"""The ledger: ids and positions of all tokens, from which all other data can be rebuilt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedModelError
from kvkeep.memory.clock import Clock
from kvkeep.memory.places import Place
from kvkeep.memory.rows import Buffer


class Ledger:
    """Token ids and positions of every slot, 4 bytes each: (batch, slots, 1) int32.

    If ``records`` is False, it records only their number, for caches that rebuild no entries. home: where they lie, by
    default with the tokens.
    """

    def __init__(self, records: bool = True, home: Place | None = None) -> None:
        self.records, self.home = records, home
        self.ids = Buffer(home=home)
        self.positions = Buffer(home=home)
        self.length = 0  # slots recorded so far
        self.batch = 0  # rows
        self.device = torch.device("cpu")  # device of the last tokens
        self.continues = False  # the text goes on after the tokens of the present pass
        self.clock: Clock | None = None  # in a pass that is captured, or compared with one
        # State of the current forward pass; None: no padding.
        self.visible: Tensor | None = None  # (batch, slots) bool
        self.first: Tensor | None = None  # (batch,), the first slot that is not padding
        self.origin: Tensor | None = None  # the same in the host's memory: reading it never waits
        self._padding: list[int] | None = None
        self._by_lane: dict[int, Tensor] = {}  # by number of KV heads per row
        self._unpadded_tail = 0  # number of last slots without padding in any row

    def append(
        self, ids: Tensor | None, embeddings: Tensor | None, positions: Tensor | None, mask: Tensor | None
    ) -> None:
        """Record the tokens of a forward pass. ids (batch, n) or embeddings (batch, n, hidden); positions
        (batch or 1, n), by default the next ones; mask (batch, slots so far) with 0 for padding."""
        tokens = ids if ids is not None else embeddings
        assert tokens is not None
        (self.batch, count), self.device = tokens.shape[:2], tokens.device
        if positions is not None and positions.ndim != 2:
            raise UnsupportedModelError(
                "Positions of several axes (multimodal rotary) are not supported yet; use method 'full'."
            )
        if self.records:
            if positions is None:
                positions = torch.arange(self.length, self.length + count, device=tokens.device).unsqueeze(0)
            self.positions.append(positions.expand(self.batch, -1).unsqueeze(-1).int())
            self.ids.append((ids if ids is not None else tokens.new_zeros(self.batch, count)).unsqueeze(-1).int())
        self.length += count
        self._see(mask[:, : self.length] if mask is not None and mask.ndim == 2 else None)

    @contextmanager
    def counting(self, clock: Clock) -> Iterator[None]:
        """Within the block, operators read the token's slot from the device."""
        self.clock = clock
        try:
            yield
        finally:
            self.clock = None

    def number(self, slots: int) -> int | Tensor:
        """Return a slot, or a number of slots, as operators of the present pass take it: a tensor on the device in a
        pass that is captured."""
        return slots if self.clock is None else self.clock.of(slots)

    def slots(self, first: int, count: int, device: torch.device) -> Tensor:
        """Return the slots from ``first`` on, (count,) int32, as :meth:`number` does."""
        if self.clock is None:
            return torch.arange(first, first + count, dtype=torch.int32, device=device)
        return torch.arange(count, dtype=torch.int32, device=device) + self.clock.of(first)

    def _see(self, mask: Tensor | None) -> None:
        """Record padding from a mask (batch, slots), read once on the host."""
        self.visible = self.first = self.origin = self._padding = None
        self._by_lane.clear()
        if mask is None or (host := mask.cpu().bool()).all():
            return
        self.visible = mask.bool()
        self.first, self.origin = self.visible.int().argmax(1), host.int().argmax(1)
        self._padding = (~host).sum(1).tolist()
        gaps = (~host.all(0)).nonzero()
        self._unpadded_tail = self.length - 1 - int(gaps[-1])

    def visible_by(self, heads: int) -> Tensor | None:
        """Return the slots that are not padding, (lanes, 1, 1, slots) bool, ``heads`` lanes a row; None without
        padding."""
        if self.visible is None:
            return None
        if heads not in self._by_lane:
            self._by_lane[heads] = self.visible.repeat_interleave(heads, 0)[:, None, None]
        return self._by_lane[heads]

    def unpadded(self, lse: Tensor, heads: int) -> Tensor:
        """Return a log-sum-exp of the last queries, (lanes, heads of a lane, queries), that excludes the queries of
        padding."""
        if (visible := self.visible_by(heads)) is None:
            return lse
        return lse.masked_fill(~visible[..., -lse.shape[2] :].squeeze(1), float("inf"))

    def first_by(self, heads: int) -> Tensor | None:
        """Return the first slot that is not padding, (lanes, 1); None without padding."""
        return None if self.first is None else self.first.repeat_interleave(heads, 0)[:, None]

    @property
    def counts(self) -> list[int] | None:
        """The number of slots of each row that are not padding; None without padding."""
        return None if self._padding is None else [self.length - count for count in self._padding]

    def all_tokens(self, count: int) -> bool:
        """Return whether the last ``count`` slots are tokens in every row."""
        return self.visible is None or count <= self._unpadded_tail

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return ids and positions of slots ``start``..``stop``, (batch, n) each."""
        return self.ids.view(start, stop).squeeze(-1), self.positions.view(start, stop).squeeze(-1)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        for rows in (self.ids, self.positions):
            rows.truncate(length)
        if self.visible is not None:
            self._see(self.visible[:, :length])

    def select(self, index: Tensor) -> None:
        self.batch = len(index)
        for rows in (self.ids, self.positions):
            rows.select(index)
        if self.visible is not None:
            self._see(self.visible[index.to(self.visible.device)])

    def restore(
        self, length: int, batch: int, ids: Tensor | None, positions: Tensor | None, visible: Tensor | None
    ) -> None:
        """Restore ``length`` slots of ``batch`` rows. ids, positions: (batch, slots, 1), if recorded; visible: (batch,
        slots) bool, if there is padding."""
        self.length, self.batch = length, batch
        if self.records and ids is not None and positions is not None:
            self.ids.append(ids)
            self.positions.append(positions)
        self._see(visible)

    @property
    def padding_bytes(self) -> int:
        """Bytes of the state of padding."""
        masks = (self.visible, self.first, self.origin, *self._by_lane.values())
        return sum(mask.nbytes for mask in masks if mask is not None)
