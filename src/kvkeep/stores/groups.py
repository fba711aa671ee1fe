"""Entries that left, kept in another form by groups: in a ring of so many groups, or in all the room they need."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvkeep.stores.meter import nbytes

GROUP = 32
"""Entries of a group."""

Encode = Callable[[Tensor, Tensor, Tensor], list[Tensor]]


class Groups:
    """One layer's. Entries wait exactly until they are a group; ``encode`` then turns keys and values (batch, kv_heads,
    GROUP, dim) and slots (batch, kv_heads, GROUP) into parts (batch, kv_heads, ...). ``room``: groups held at most, the
    oldest make way; None: no end."""

    def __init__(self, room: int | None, encode: Encode) -> None:
        self.room, self.encode = room, encode
        self.waiting: list[Tensor] = []  # keys, values, slots
        self.count = 0  # of them
        self.parts: list[Tensor] = []  # (batch, kv_heads, groups, ...)
        self.slots: Tensor | None = None  # (batch, kv_heads, groups, GROUP)
        self.written = 0  # groups ever written
        self.holes = False  # whether some slots are -1

    @property
    def held(self) -> int:
        """Groups held."""
        return self.written if self.room is None else min(self.written, self.room)

    def take(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Take entries: (batch, kv_heads, n, dim) and their slots (batch, kv_heads, n), -1 for none."""
        rows = keys, values, slots
        if not self.waiting:
            self.waiting = [one.new_empty(*one.shape[:2], GROUP, *one.shape[3:]) for one in rows]
        start = 0
        while start < keys.shape[2]:
            count = min(GROUP - self.count, keys.shape[2] - start)
            for kept, one in zip(self.waiting, rows, strict=True):
                kept[:, :, self.count : self.count + count] = one[:, :, start : start + count]
            self.count += count
            start += count
            if self.count == GROUP:
                self._write()

    def _write(self) -> None:
        slots, self.count = self.waiting[2], 0
        self.holes = self.holes or bool((slots < 0).any())
        parts = [*self.encode(*self.waiting), slots]
        if self.slots is None or (self.held == self.slots.shape[2] and self.held != self.room):
            self._grow(parts)
        assert self.slots is not None
        place = self.written if self.room is None else self.written % self.room
        for kept, part in zip([*self.parts, self.slots], parts, strict=True):
            kept[:, :, place] = part
        self.written += 1

    def _grow(self, like: list[Tensor]) -> None:
        """Make room for half as many groups again."""
        old = [] if self.slots is None else [*self.parts, self.slots]
        size = max(8, self.held + self.held // 2)
        size = size if self.room is None else min(self.room, size)
        fresh = [part.new_empty(*part.shape[:2], size, *part.shape[2:]) for part in like]
        for part, before in zip(fresh, old, strict=False):
            part[:, :, : self.held] = before[:, :, : self.held]
        *self.parts, self.slots = fresh

    def by_lane(self) -> tuple[list[Tensor], Tensor]:
        """Return views of the parts (lanes, groups, ...) and slots (lanes, groups, GROUP) held."""
        assert self.slots is not None
        *parts, slots = (part[:, :, : self.held].flatten(0, 1) for part in (*self.parts, self.slots))
        return parts, slots

    def still_waiting(self) -> list[Tensor]:
        """Return keys, values (lanes, n, dim) and slots (lanes, n) of what is not a group yet."""
        return [rows[:, :, : self.count].flatten(0, 1) for rows in self.waiting]

    def truncate(self, length: int) -> None:
        """Leave holes where slots are forgotten."""
        for slots in (self.slots, *self.waiting[2:]):
            if slots is not None:
                self.holes = True
                slots.masked_fill_(slots >= length, -1)

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""
        self.waiting = [rows.index_select(0, index.to(rows.device)) for rows in self.waiting]
        self.parts = [rows.index_select(0, index.to(rows.device)) for rows in self.parts]
        self.slots = None if self.slots is None else self.slots.index_select(0, index.to(self.slots.device))

    def found(self, rows: int, heads: int, length: int, grouped: int) -> Tensor:
        """Return codes (rows, heads, length): ``grouped`` where a slot is in a group, 1 where it waits, else 0."""
        codes = torch.zeros(rows, heads, length + 1, dtype=torch.int64)
        if self.slots is not None:
            slots = self.slots[:, :, : self.held].flatten(2).cpu().long()
            codes.scatter_(2, slots.masked_fill(slots < 0, length), grouped)
        if self.count:
            slots = self.waiting[2][:, :, : self.count].cpu().long()
            codes.scatter_(2, slots.masked_fill(slots < 0, length), 1)
        return codes[..., :length]

    def state(self) -> dict[str, Tensor]:
        """Return what must be saved."""
        saved = {"counts": torch.tensor([self.count, self.written, self.holes, len(self.waiting), len(self.parts)])}
        every = [*self.waiting, *self.parts, *([] if self.slots is None else [self.slots])]
        return saved | {str(number): tensor for number, tensor in enumerate(every)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` gave."""
        self.count, self.written, holes, waiting, parts = state["counts"].tolist()
        self.holes = bool(holes)
        every = [state[str(number)] for number in range(len(state) - 1)]
        self.waiting, self.parts = every[:waiting], every[waiting : waiting + parts]
        self.slots = every[-1] if parts else None

    @property
    def nbytes(self) -> int:
        """Bytes allocated for entries."""
        return nbytes(*self.parts, *self.waiting[:2])

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes allocated for slots."""
        return nbytes(self.slots, *self.waiting[2:])
