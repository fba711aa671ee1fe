"""The newest groups of lanes that have different numbers of places: in banks, like the resident entries."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.contracts.entries import EntryState, EvictedEntries, Piece
from kvkeep.contracts.resident import Resident, WorkingSet
from kvkeep.contracts.store import EvictedStore
from kvkeep.memory.extent import Extent, ShapeError, fits, within
from kvkeep.step.plan import Destination, Span, StoreShare
from kvkeep.stores.evicted.groups import GROUP, Codec, NewestGroups


@dataclass
class GroupBank:
    """Lanes with the same number of places."""

    lanes: Tensor | None
    """The indices of the lanes; None: all."""
    store: NewestGroups
    """Their entries."""

    def __post_init__(self) -> None:
        lanes = [] if self.lanes is None else self.lanes.tolist()
        self.index = {lane: place for place, lane in enumerate(lanes)}
        """The place of each lane in the store."""

    def of(self, rows: Tensor) -> Tensor:
        """Return the part of ``rows``, a tensor by lane, for the lanes of this bank."""
        return rows if self.lanes is None else rows[self.lanes]


class GroupBanks(EvictedStore):
    """The newest groups of every lane. capacity: the number of groups of a lane; after :meth:`divide`, the average over
    the lanes of all layers.

    All banks have the same number of waiting entries, so that a group of each lane is encoded in the same step.
    """

    def __init__(self, capacity: int, codec: Codec, device: torch.device) -> None:
        self.capacity, self.codec, self.device = capacity, codec, device
        self.banks = [GroupBank(None, NewestGroups(capacity, codec))]

    @property
    def max_entries(self) -> int:
        return self.capacity * GROUP

    def divide(self, places: Sequence[int]) -> list[tuple[Tensor | None, EvictedStore]]:
        """Give each lane a number of places, rounded down to groups."""
        groups = [count // GROUP for count in places]
        self.banks = []
        for capacity in sorted(set(groups)):
            members = [lane for lane, count in enumerate(groups) if count == capacity]
            lanes = None if len(members) == len(groups) else torch.tensor(members, device=self.device)
            self.banks.append(GroupBank(lanes, NewestGroups(capacity, self.codec)))
        return [(bank.lanes, bank.store) for bank in self.banks]

    @property
    def plans_each_lane(self) -> bool:
        return len(self.banks) > 1

    def take(self, left: EvictedEntries, resident: WorkingSet) -> None:
        for bank in self.banks:
            bank.store.take(left.each(bank.of), resident)

    def plan(self, append: Destination, first_lane: int, evicts: int) -> StoreShare | None:
        for bank in self.banks:
            if bank.lanes is None:
                return bank.store.plan(append, first_lane, evicts)
            if first_lane in bank.index:
                return bank.store.plan(append, bank.index[first_lane], evicts)
        return None

    def commit(self) -> None:
        for bank in self.banks:
            bank.store.commit()

    def spans(self) -> Sequence[Span] | None:
        return self.banks[0].store.spans() if len(self.banks) == 1 else None

    def pieces(self, query: Tensor, resident: Resident, length: int) -> Iterator[Piece]:
        for bank in self.banks:
            for piece in bank.store.pieces(query, resident, length):
                yield piece._replace(lanes=bank.lanes)

    def states(self, lanes: int, length: int) -> Tensor:
        found = torch.full((lanes, length), EntryState.DROPPED, dtype=torch.int8)
        for bank in self.banks:
            members = slice(None) if bank.lanes is None else bank.lanes.cpu()
            found[members] = bank.store.states(lanes if bank.lanes is None else len(bank.lanes), length)
        return found

    def truncate(self, length: int, resident: WorkingSet) -> None:
        for bank in self.banks:
            bank.store.truncate(length, resident)

    def select(self, lanes: Tensor) -> None:
        old, self.banks = self.banks, []
        for bank in old:
            if bank.lanes is None:
                bank.store.select(lanes)
                self.banks.append(bank)
                continue
            chosen, places = (lanes.to(self.device)[:, None] == bank.lanes).nonzero(as_tuple=True)
            if len(chosen) or (not len(lanes) and not self.banks):  # a batch of no rows has one bank
                bank.store.select(places)
                members = None if len(chosen) == len(lanes) else chosen.clone()  # a view would keep the places, too
                self.banks.append(GroupBank(members, bank.store))

    def state(self) -> dict[str, Tensor]:
        if not self._divided:
            return self.banks[0].store.state()
        saved: dict[str, Tensor] = {}
        for number, bank in enumerate(self.banks):
            assert bank.store.capacity is not None
            saved[f"{number}.capacity"] = torch.tensor([bank.store.capacity])
            if bank.lanes is not None:
                saved[f"{number}.lanes"] = bank.lanes
            saved |= {f"{number}.{name}": one for name, one in bank.store.state().items()}
        return saved

    @property
    def _divided(self) -> bool:
        return len(self.banks) > 1 or self.banks[0].store.capacity != self.capacity

    def restore(self, state: dict[str, Tensor]) -> None:
        if "0.capacity" not in state:
            self.banks[0].store.restore(state)
            return
        self.banks = []
        while f"{(number := len(self.banks))}.capacity" in state:
            tensors = {
                name.removeprefix(f"{number}."): one for name, one in state.items() if name.startswith(f"{number}.")
            }
            store = NewestGroups(int(tensors.pop("capacity")[0]), self.codec)
            lanes = tensors.pop("lanes", None)
            store.restore(tensors)
            self.banks.append(GroupBank(None if lanes is None else lanes.to(self.device), store))

    def check(self, extent: Extent) -> None:
        found: list[int] = []
        for bank in self.banks:
            if bank.lanes is not None:
                within("lanes", fits("lanes", bank.lanes, (None,), torch.int64), 0, extent.lanes)
            members = [*range(extent.lanes)] if bank.lanes is None else bank.lanes.tolist()
            within("capacity", bank.store.capacity or 0, 1, sys.maxsize)
            bank.store.check(replace(extent, lanes=len(members)))
            found += members
        if sorted(found) != [*range(extent.lanes)] or len({bank.store.count for bank in self.banks}) > 1:
            raise ShapeError("evicted entries are not of all KV heads")

    def places(self, lanes: int) -> int:
        return sum(
            (bank.store.max_entries or 0) * (lanes if bank.lanes is None else len(bank.lanes)) for bank in self.banks
        )

    @property
    def compressed_bytes(self) -> int:
        return sum(bank.store.compressed_bytes for bank in self.banks)

    @property
    def bookkeeping_bytes(self) -> int:
        lanes = sum(bank.lanes.nbytes for bank in self.banks if bank.lanes is not None)
        return lanes + sum(bank.store.bookkeeping_bytes for bank in self.banks)
