"""The base of stores that merge neighbours: their state of each lane, and its rollback.

Entries lie in the order of the text. An entry's slot is the last one it stands for. Positions are the running sum of
the counts, counted back from the next token. So a key is rotated only when a count from it on is cut or removed.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.contracts.entries import EntryState
from kvkeep.contracts.resident import WorkingSet
from kvkeep.contracts.site import Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.memory.extent import Extent, ShapeError, fits, within
from kvkeep.memory.meter import nbytes
from kvkeep.models.adapter import Adapter
from kvkeep.stores.evicted.merge_on_evict import merged_states
from kvkeep.stores.resident.banks import Bank


class MergesNeighbours(EvictedStore):
    """Makes room among resident entries by merging, without the selector's ranks. slack: the number of tokens that one
    merging makes room for while decoding."""

    keeps = False
    makes_room = True
    by_lane: ClassVar[tuple[str, ...]] = ("moved", "lost")
    """The names of tensors (lanes, ...), each None before its first use."""

    def __init__(self, site: Site, adapter: Adapter, slack: int) -> None:
        self.layer, self.ledger, self.meter = site.layer.index, site.ledger, site.meter
        self.adapter, self.slack = adapter, slack
        self.tally = torch.zeros(2, dtype=torch.float64)
        """(2,), the number of pairs merged so far, and the number of shares that were clamped."""
        self.moved: Tensor | None = None
        """(lanes, 1) int32, the number of tokens in no entry's count: beyond the cap, lost where pairs overlapped, or
        removed by a rollback together with others."""
        self.lost: Tensor | None = None
        """(lanes, 2 n) int32, the slots from..to that rollbacks removed together with others."""
        self.length = 0
        """The number of settled slots."""

    def _turned(self, keys: Tensor, by: Tensor) -> Tensor:
        """Return keys (lanes, n, dim) rotated to ``by`` (lanes, n) positions later."""
        by_head = keys[:, None]
        return self.adapter.turn(self.layer, by_head, self.adapter.angles(self.layer, by_head, by.long()))[:, 0]

    def _tokens(self, bank: Bank, heads: int) -> Tensor:
        """Return the number of settled slots that are tokens, in the row of each lane of a bank, (lanes, 1)."""
        if (visible := self.ledger.visible_by(heads)) is None:
            return torch.full((len(bank.slots), 1), self.length, device=bank.slots.device)
        return bank.of(visible)[:, 0, 0, : self.length].sum(1, keepdim=True)

    def settled(self, observed: bool, resident: WorkingSet) -> None:
        self.length = resident.length

    def merged(self) -> tuple[int, int]:
        pairs, clamped = self.tally.tolist()
        return int(pairs), int(clamped)

    def states(self, lanes: int, length: int) -> Tensor:
        """Return the states: dropped where a rollback removed entries, else merged (also for entries lost where pairs
        overlapped)."""
        codes = merged_states(self.ledger, lanes, length)
        if self.lost is not None:
            slots = torch.arange(length)
            for span in self.lost.cpu().unflatten(1, (-1, 2)).unbind(1):
                codes[(slots >= span[:, :1]) & (slots < span[:, 1:])] = int(EntryState.DROPPED)
        return codes

    # -- the cache contract -------------------------------------------------------------------------

    def truncate(self, length: int, resident: WorkingSet) -> None:
        """Remove every entry that stands for a forgotten slot, with its other slots; earlier entries move up."""
        if length >= self.length:
            return
        self.length = length
        if self.lost is not None:
            self.lost.clamp_(max=length)
        if self.moved is None:
            return
        spans = torch.zeros(resident.banks.lanes, 2, dtype=torch.int32, device=self.moved.device)
        for bank in resident.banks:
            if not bank.columns:
                continue
            moved = self._tokens(bank, resident.banks.heads) - bank.counts().sum(1, keepdim=True)
            by = moved - bank.of(self.moved)
            self.moved[bank.index] = moved.int()
            if bank.used and bool((by != 0).any()):
                used = bank.keys[:, : bank.used]
                used.copy_(self._turned(used.float(), by.expand(-1, bank.used)))
            spans[bank.index, :1] = bank.slots.amax(1, keepdim=True) + 1
            spans[bank.index, 1:] = length
        if bool((spans[:, 0] < spans[:, 1]).any()):
            self.lost = spans if self.lost is None else torch.cat([self.lost, spans], 1)

    def select(self, lanes: Tensor) -> None:
        for name, rows in self._by_lane().items():
            setattr(self, name, rows.index_select(0, lanes.to(rows.device)))

    def _by_lane(self) -> dict[str, Tensor]:
        return {name: rows for name in self.by_lane if (rows := getattr(self, name)) is not None}

    @property
    def bookkeeping_bytes(self) -> int:
        return nbytes(self.tally, *self._by_lane().values())

    def state(self) -> dict[str, Tensor]:
        return self._by_lane() | {"tally": self.tally, "length": torch.tensor([self.length])}

    def restore(self, state: dict[str, Tensor]) -> None:
        for name in self.by_lane:
            setattr(self, name, state.get(name))
        self.tally, self.length = state["tally"], int(state["length"][0])

    def check(self, extent: Extent) -> None:
        fits("tally", self.tally, (2,), torch.float64)
        if self.length != extent.slots:
            raise ShapeError(f"merging is not of {extent.slots} slots")
        self._counted("moved", extent)
        if self.lost is not None:
            self._counted("lost", extent, None)
            within("lost", self.lost.shape[1] % 2, 0, 1)

    def _counted(self, name: str, extent: Extent, columns: int | None = 1) -> None:
        """Raise ShapeError where the tensor ``name`` exists and is not (lanes, ``columns``) numbers of slots."""
        if (counted := getattr(self, name)) is not None:
            within(name, fits(name, counted, (extent.lanes, columns), torch.int32), 0, extent.slots + 1)
