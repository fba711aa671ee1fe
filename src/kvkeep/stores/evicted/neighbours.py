"""Neighbours become one entry: instead of evicting, a store merges them (AsymKV, KVSlimmer).

Entries lie in the order of the text, and an entry's slot is the last one it stands for. New ones are appended until the
budget is full; then the cheapest disjoint pairs of neighbours are merged at once (:mod:`kvkeep.stores.evicted.pairs`),
so that one pass serves many tokens. A merged entry has the mean of its values, and their count. The method determines
its key.

Positions are the running sum of the counts (AsymKV), counted from the end: an entry's position is that of the next
token minus the counts from the entry on. Rotary attention depends on differences only. So queries and new keys keep the
model's positions, and a key is rotated only when it is merged, or when a count from it on is capped or removed.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import EntryState
from kvkeep.contracts.part import Site
from kvkeep.contracts.resident import WorkingSet
from kvkeep.contracts.store import EvictedStore
from kvkeep.memory.extent import Extent, ShapeError, fits, within
from kvkeep.memory.meter import nbytes
from kvkeep.models.adapter import Adapter
from kvkeep.stores.evicted.pairs import OrderedEntries, PairMerging, cheapest, merge
from kvkeep.stores.resident.banks import Bank
from kvkeep.stores.resident.eviction import Arriving
from kvkeep.stores.slots import merged_states


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
        """Return the number of merged pairs of entries, and the number of those with a clamped weight."""
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


class MergeNeighbours(MergesNeighbours):
    """Merges by the attention of past queries. It needs a selector that adds up all attention, as H2O does."""

    by_lane = (*MergesNeighbours.by_lane, "since", "due", "outputs")

    def __init__(self, site: Site, how: PairMerging, adapter: Adapter, slack: int) -> None:
        super().__init__(site, adapter, slack)
        self.how, self.readers = how, site.readers
        self.since: Tensor | None = None  # (lanes, 1) int32: the slots at the last reset of attention
        self.due: Tensor | None = None  # (lanes, 1) int32: next value of ``since``; 0: unchanged
        self.outputs: Tensor | None = None  # (lanes, value_dim): sum of heads and queries after ``since``
        self.group, self.heads = 1, 1  # query heads of a group; KV heads of a row

    # -- what is observed ---------------------------------------------------------------------------

    def begin(self, resident: WorkingSet) -> None:
        """Forget the attention observed before the last merging. This happens just before the next observation, so that
        some attention is always known."""
        if self.due is None or self.since is None:
            return
        kept = self.due == 0
        self.since, self.due = torch.where(kept, self.since, self.due), None
        for bank in resident.banks:
            if bank.scores is not None:
                bank.scores *= bank.of(kept)
        if self.outputs is not None:
            self.outputs *= kept

    def attended(self, step: AttentionInputs, output: Tensor, resident: WorkingSet) -> None:
        """Add up the outputs."""
        self.group, self.heads = step.query.shape[1], step.heads
        by_head = output.float()
        if (visible := self.ledger.visible_by(step.heads)) is not None:
            by_head = by_head * visible[..., -step.queries :].transpose(2, 3)
        summed = by_head.sum((1, 2))
        self.outputs = summed if self.outputs is None else self.outputs.add_(summed)

    def settled(self, observed: bool, resident: WorkingSet) -> None:
        """Apply the reset that is due where the new entries' attention was not observed."""
        super().settled(observed, resident)
        if not observed:
            self.begin(resident)

    def _attention(self, slots: Tensor, scores: Tensor, since: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Return each entry's weight, and which entries already have one.

        The weight is the mean over the query heads of the lane, and over the queries since the last merging that could
        see the entry. So a new entry has no disadvantage from the few queries after it.
        """
        queries = (end - torch.maximum(slots, since)).clamp(min=0)
        return scores / (queries.clamp(min=1) * self.readers), (queries > 0) & (slots >= 0)

    # -- merging ------------------------------------------------------------------------------------

    def make_room(self, bank: Bank, new: Arriving, resident: WorkingSet) -> None:
        with self.meter.merging():
            self._make_room(bank, new, resident.banks.lanes)

    def _make_room(self, bank: Bank, new: Arriving, lanes: int) -> None:
        used, device = bank.used, new.keys.device
        if self.since is None or self.moved is None:
            self.since, self.moved = (torch.zeros(lanes, 1, dtype=torch.int32, device=device) for _ in range(2))
        # A single entry is settled before any query attends to it, so it does not merge yet.
        end = new.first if new.scores is None else new.first + new.count
        slots = torch.cat([bank.slots[:, :used], new.slots], 1)
        fresh = torch.zeros(new.slots.shape, device=device) if new.scores is None else new.scores
        scores = torch.cat([bank.scored()[:, :used], fresh], 1)
        attention, known = self._attention(slots, scores, bank.of(self.since), end)
        counts = torch.cat([bank.counts(), (new.slots >= 0).float()], 1)
        both = torch.cat([bank.keys[:, :used], new.keys], 1), torch.cat([bank.values[:, :used], new.values], 1)
        entries = OrderedEntries(*both, slots, counts, attention, known)
        if not new.unpadded or bank.gaps:
            entries = entries.at(entries.slots.argsort(dim=1, stable=True))
        occupied = (entries.slots >= 0).sum(1, keepdim=True)
        excess = torch.where(occupied > bank.columns, (occupied - bank.columns).clamp(min=self.slack), 0)
        if bool(excess.any()):
            entries.clues = self.clues(bank, entries, end)
        with self.meter.holding(*both, *both):  # entries before and after merging
            merged = self._merged(bank, entries, excess, end)
            cut = entries.counts.sum(1, keepdim=True) - merged.counts.sum(1, keepdim=True)
            self.moved[bank.index] += cut.int()
            self._write(bank, merged, excess > 0, end)

    def _merged(self, bank: Bank, entries: OrderedEntries, excess: Tensor, end: int) -> OrderedEntries:
        """Merge ``excess`` (lanes, 1) pairs and return the entries; one pass at most halves their number."""
        first = self.ledger.first_by(self.heads)
        start = 0 if first is None else bank.of(first)
        while int(excess.max()) > 0:
            chosen = cheapest(entries, start + self.how.sinks, excess)
            made = chosen.sum(1, keepdim=True)
            if not int(made.sum()):
                raise AssertionError("there is nothing to merge")  # budgets prevent this
            entries, tally = merge(entries, chosen, self.how, self._turned, self._output(bank, start, end))
            self.tally = self.tally.to(tally.device) + tally
            excess = excess - made
        return entries

    def _output(self, bank: Bank, start: Tensor | int, end: int) -> Tensor | None:
        """Return the layer's mean output since the last reset of attention, (lanes, 1, value_dim)."""
        if self.outputs is None or self.since is None:
            return None
        queries = (end - torch.maximum(bank.of(self.since), torch.as_tensor(start))).clamp(min=1)
        return (bank.of(self.outputs) / (queries * self.group * self.readers))[:, None]

    def clues(self, bank: Bank, entries: OrderedEntries, end: int) -> Tensor | None:
        """Return the data of each entry, beside its attention, that the method needs for merging: (lanes, entries,
        any), for the slots before ``end``. None: it needs no other data."""
        return None

    def _write(self, bank: Bank, entries: OrderedEntries, merged: Tensor, end: int) -> None:
        """Write entries into a bank, up to its last column in every lane. Where pairs were merged, the reset of
        attention is due."""
        occupied = (entries.slots >= 0).sum(1)
        longest, shortest = int(occupied.max()), int(occupied.min())
        assert longest <= bank.columns
        stop, span = entries.slots.shape[1], slice(0, longest)
        last = slice(stop - longest, stop)
        bank.keys[:, span], bank.values[:, span] = entries.keys[:, last], entries.values[:, last]
        bank.slots[:, longest:] = -1
        bank.slots[:, span] = entries.slots[:, last]
        if bank.extra is None:
            bank.extra = torch.zeros(bank.slots.shape, device=bank.slots.device)
        bank.extra.zero_()[:, span] = (entries.counts[:, last] - 1).clamp(min=0)
        assert self.since is not None
        queries = (end - torch.maximum(entries.slots, bank.of(self.since))).clamp(min=0)
        scores = entries.attention * queries * self.readers
        bank.scores = torch.zeros(bank.slots.shape, device=bank.slots.device)
        bank.scores[:, span] = scores[:, last]
        bank.used, bank.gaps = longest, longest - shortest
        if self.due is None:
            self.due = torch.zeros_like(self.since)
        self.due[bank.index] = torch.where(merged, end, bank.of(self.due)).int()

    # -- the cache contract -------------------------------------------------------------------------

    def truncate(self, length: int, resident: WorkingSet) -> None:
        if length < self.length:
            self.forget_queries(length, resident)
            for counted in (self.since, self.due):
                if counted is not None:
                    counted.clamp_(max=length)
        super().truncate(length, resident)

    def forget_queries(self, length: int, resident: WorkingSet) -> None:
        """Forget the queries from slot ``length`` on. The observed means stay the same, over the remaining queries."""

        def left(first: Tensor) -> Tensor:
            """Return the share of the queries from slot ``first`` on that remain."""
            return (length - first).clamp(min=0) / (self.length - first).clamp(min=1)

        for bank in resident.banks:
            if bank.scores is not None:
                since = bank.slots.new_zeros(1) if self.since is None else bank.of(self.since)
                bank.scores = bank.scores * left(torch.maximum(bank.slots, since))
        if self.outputs is not None:
            since = torch.zeros_like(self.outputs[:, :1]) if self.since is None else self.since
            first = self.ledger.first_by(self.heads)
            self.outputs *= left(since if first is None else torch.maximum(since, first))

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"groups": torch.tensor([self.heads, self.group])}

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        self.heads, self.group = state["groups"].tolist()

    def check(self, extent: Extent) -> None:
        super().check(extent)
        if self.heads != extent.lanes // self.ledger.batch:
            raise ShapeError(f"merging is not of {extent.lanes} KV heads")
        for name in ("since", "due"):
            self._counted(name, extent)
        if self.outputs is not None:
            fits("outputs", self.outputs, (extent.lanes, extent.value_dim), torch.float32)
