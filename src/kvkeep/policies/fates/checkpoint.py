"""``checkpoint``: what leaves is kept in a form from which exact keys and values come back (KV-Direct)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.attention.described import Described
from kvkeep.contracts.entries import EntryState, Evicted, Piece
from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.resident import Resident, WorkingSet
from kvkeep.contracts.site import Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.kernels.entering import Entering
from kvkeep.memory.extent import Extent, Misfit, within
from kvkeep.memory.places import Device
from kvkeep.memory.rows import Buffer, Ring, concatenated
from kvkeep.stores.slots import flags_of, without


@dataclass(frozen=True)
class Checkpointed(Fate):
    """``kind``: kv, residual, residual:STRIDE or tokens; by default what the cache's ``checkpoint`` says."""

    kind: str = ""

    label: ClassVar[str] = "checkpointed"
    source: ClassVar[str] = "KV-Direct, arXiv:2603.19664"
    work: ClassVar[str] = "checkpoint"
    returns: ClassVar[str] = "all pages, exact"
    exactness: ClassVar[Exactness] = Exactness.EXACT
    checkpoints: ClassVar[bool] = True

    def store(self, site: Site, shared: Any) -> EvictedStore:
        assert site.checkpoint is not None
        if site.in_order:
            return InOrder(site)
        return ByResidual(site) if site.checkpoint.by_token else ByEntry(site)


@dataclass(frozen=True)
class Recorded(Checkpointed):
    """The same, with the ids of all tokens, by which the text can be read once more."""

    records: ClassVar[bool] = True


class _OnCheckpoint(EvictedStore):
    """Evicted entries that are in the cache's checkpoint."""

    def __init__(self, site: Site) -> None:
        assert site.checkpoint is not None
        self.checkpoint, self.layer = site.checkpoint, site.layer.index

    def states(self, lanes: int, length: int) -> Tensor:
        codes = torch.full((lanes, length), EntryState.CHECKPOINTED, dtype=torch.int8)
        codes[:, : self.checkpoint.first(self.layer)] = EntryState.DROPPED
        return codes


class InOrder(_OnCheckpoint):
    """The first entries of the text, which left in order, in all lanes alike."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.taken: int = 0

    def take(self, left: Evicted, resident: WorkingSet) -> None:
        self.checkpoint.truncate(self.layer, self.taken)  # a write that failed may have left something behind
        self.checkpoint.append(self.layer, left.keys, left.values)
        self.taken += left.slots.shape[1]

    def receives(self, entering: Entering, leaves: bool) -> Sequence[Described] | None:
        self.checkpoint.truncate(self.layer, self.taken)
        if leaves and not self.checkpoint.receives(self.layer, entering):
            return None
        stop = self.taken + leaves
        table = self.checkpoint.described(self.layer, stop) if stop else None
        return () if not stop else None if table is None else (table,)

    def received(self) -> None:
        self.checkpoint.received(self.layer)
        self.taken += 1

    def pieces(self, query: Tensor, resident: Resident, length: int) -> Iterator[Piece]:
        if self.taken:
            yield from self.checkpoint.pieces(self.layer, self.taken, lazy=True)

    def pages(self) -> Iterator[Piece]:
        """Yield all of them as tensors, a page at a time."""
        if self.taken:
            yield from self.checkpoint.pieces(self.layer, self.taken)

    def described(self, query: Tensor) -> Sequence[Described] | None:
        table = self.checkpoint.described(self.layer, self.taken) if self.taken else None
        return () if not self.taken else None if table is None else (table,)

    def truncate(self, length: int, resident: WorkingSet) -> None:
        self.taken = min(self.taken, length)
        self.checkpoint.truncate(self.layer, self.taken)

    def state(self) -> dict[str, Tensor]:
        return {"count": torch.tensor([self.taken])}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.taken = int(state["count"][0])

    def check(self, extent: Extent) -> None:
        within("entries that left", self.taken, 0, extent.slots + 1)
        if not self.checkpoint.by_token and self.checkpoint.length(self.layer) != self.taken:
            raise Misfit("entries that left are missing in the checkpoint")


class ByEntry(_OnCheckpoint):
    """Entries that leave in any order, and every head's are others: their slots are kept beside them."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        capacity = self.checkpoint.capacity
        self.slots: Buffer | Ring = Buffer() if capacity is None else Ring(capacity, Device(site.device))
        self.holes = False  # whether any slot is -1

    def take(self, left: Evicted, resident: WorkingSet) -> None:
        self.checkpoint.append(self.layer, left.keys, left.values)
        self.slots.append(left.slots[..., None].int())
        self.holes |= left.holes

    def pieces(self, query: Tensor, resident: Resident, length: int) -> Iterator[Piece]:
        if not self.slots.length:
            return
        for piece in self.checkpoint.pieces(self.layer, self.slots.length):
            stop = piece.first + piece.keys.shape[2]
            slots = concatenated(self.slots, piece.first, stop).squeeze(-1)
            yield piece._replace(slots=slots, first=0, holes=self.holes)

    def described(self, query: Tensor) -> Sequence[Described] | None:
        if not self.slots.length:
            return ()
        table = None if self.holes else self.checkpoint.described(self.layer, self.slots.length)
        return None if table is None else (table,)

    def states(self, lanes: int, length: int) -> Tensor:
        """Return what became of the entry of each slot: all are here, but those that were lost."""
        codes = torch.full((lanes, length), EntryState.CHECKPOINTED, dtype=torch.int8)
        if self.slots.first:
            held = concatenated(self.slots, self.slots.first, self.slots.length).squeeze(-1)
            size = max(length, int(held.max()) + 1 if held.numel() else 1)
            codes.masked_fill_(~flags_of(held, size)[:, :length].cpu(), 0)
        return codes

    def _each(self) -> Iterator[Tensor]:
        return (piece for _, piece in self.slots.read(self.slots.first, self.slots.length))

    def truncate(self, length: int, resident: WorkingSet) -> None:
        self.holes = True
        for piece in self._each():
            piece.masked_fill_(piece >= length, -1)

    def forget(self, slots: Tensor) -> None:
        self.holes = True
        for piece in self._each():
            piece.copy_(without(piece.squeeze(-1), slots)[..., None])

    def select(self, lanes: Tensor) -> None:
        self.slots.select(lanes)

    @property
    def bookkeeping_bytes(self) -> int:
        return self.slots.nbytes

    def state(self) -> dict[str, Tensor]:
        span = self.slots.first, self.slots.length
        return {"first": torch.tensor([span[0]])} | (
            {"slots": concatenated(self.slots, *span)} if span[0] < span[1] else {}
        )

    def restore(self, state: dict[str, Tensor]) -> None:
        self.holes = True  # there may be
        self.slots.first = self.slots.length = int(state["first"][0])
        if "slots" in state:
            self.slots.append(state["slots"])

    def check(self, extent: Extent) -> None:
        span = self.slots.first, self.slots.length
        if span != (self.checkpoint.first(self.layer), self.checkpoint.length(self.layer)):
            raise Misfit("entries that left are missing in the checkpoint")
        if span[0] < span[1]:
            extent.numbered("slots", concatenated(self.slots, *span), (extent.lanes, None, 1))


class ByResidual(_OnCheckpoint):
    """Entries that leave in any order; each can be rebuilt, resident or not: what is resident is masked."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.left = False  # whether anything left

    def take(self, left: Evicted, resident: WorkingSet) -> None:
        self.left = True

    def pieces(self, query: Tensor, resident: Resident, length: int) -> Iterator[Piece]:
        if not self.left:
            return
        away = torch.arange(length, device=query.device).masked_fill(resident.held(), -1)
        for piece in self.checkpoint.pieces(self.layer, length):
            slots = away[:, piece.first : piece.first + piece.keys.shape[2]]
            yield piece._replace(slots=slots, first=0, holes=True)

    def state(self) -> dict[str, Tensor]:
        return {"left": torch.tensor([self.left])}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.left = bool(state["left"][0])
