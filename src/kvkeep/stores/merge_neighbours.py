"""Neighbours become one entry: nothing leaves, the least attended are merged (AsymKV, KVSlimmer).

Entries lie in the order of the text. New ones are appended until the budget is full; then the cheapest disjoint pairs
of neighbours are merged at once (:mod:`kvkeep.stores.pairs`), so that the work is paid once for many tokens. A pair's
values are added up and held as their mean beside their count; how its key is made is the method's.

Positions are the running sum of the counts (AsymKV), counted from the end: an entry's position is the next token's less
the counts from it on. Rotary attention sees differences only, so queries and new keys keep the model's own positions,
and a key is turned only when it is merged, or when a capped count brings it nearer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention.step import Step
from kvkeep.contracts import EntryState, EvictedStore, Site, WorkingSet
from kvkeep.memory.extent import Extent, Misfit, fits, within
from kvkeep.memory.meter import nbytes
from kvkeep.models.adapter import Adapter
from kvkeep.stores.banks import Bank
from kvkeep.stores.eviction import Arriving
from kvkeep.stores.merge_on_evict import merged_states
from kvkeep.stores.pairs import Asked, Entries, PairMerging, cheapest, merge

QUERIES = 32
"""Queries kept while decoding, for methods that ask anew what they attend to."""

BLOCK = 128
"""Queries (of one head) whose weights stand in memory at once."""

GRADIENTS = 4
"""Matrices of that size that a method with gradients holds at once: scores, weights, and the gradients of both."""

_BY_LANE = ("since", "due", "outputs", "asked", "lost")


class MergeNeighbours(EvictedStore):
    """Makes room among resident entries, which go by the last slot they stand for. The selector is one that adds up all
    attention, as H2O's does; it is not asked to rank.

    slack: pairs merged at once while decoding. tally: pairs merged so far, and shares that had to be clamped (float64,
    on the device).
    """

    keeps = False
    makes_room = True

    def __init__(self, site: Site, how: PairMerging, adapter: Adapter, slack: int) -> None:
        self.layer, self.ledger, self.meter, self.readers = site.layer.index, site.ledger, site.meter, site.readers
        self.how, self.adapter, self.slack = how, adapter, slack
        self.queried = site.geometry.attention_heads // site.layer.kv_heads  # query heads of a lane
        self.tally = torch.zeros(2, dtype=torch.float64)
        self.since: Tensor | None = None  # (lanes, 1) int32: the slots there were when attention was last forgotten
        self.due: Tensor | None = None  # (lanes, 1) int32: what that is at the next observation, 0 where it stays
        self.outputs: Tensor | None = None  # (lanes, value_dim): outputs of all heads and queries added up since
        self.asked: Tensor | None = None  # (lanes, heads of the group, n, dim): the queries of the last n slots
        self.scaling, self.group = 1.0, 1  # of scores; heads of a group
        self.length, self.heads = 0, 1  # slots settled; KV heads of a row
        self.lost: Tensor | None = None  # (lanes, 2 n) int32: slots from..to that a rollback took with others

    # -- what is observed ---------------------------------------------------------------------------

    def begin(self, resident: WorkingSet) -> None:
        """Forget what was observed before the last merging: done when more is about to be observed, so that there is
        always something to merge by."""
        if self.due is None or self.since is None:
            return
        kept = self.due == 0
        self.since, self.due = torch.where(kept, self.since, self.due), None
        for bank in resident.banks:
            if bank.scores is not None:
                bank.scores *= bank.of(kept)
        if self.outputs is not None:
            self.outputs *= kept

    def attended(self, step: Step, output: Tensor, resident: WorkingSet) -> None:
        """Learn the output, or keep a step's queries: a chunk's until its entries have been merged, then the last
        few."""
        self.scaling, self.group, self.heads = step.scaling, step.query.shape[1], step.heads
        if not self.how.asks:
            by_head = output.float()
            if (visible := self.ledger.visible_by(step.heads)) is not None:
                by_head = by_head * visible[..., -step.queries :].transpose(2, 3)
            summed = by_head.sum((1, 2))
            self.outputs = summed if self.outputs is None else self.outputs.add_(summed)
        elif self.asked is None or step.queries >= QUERIES or not step.own:
            self.asked = step.query
        else:
            self.asked = torch.cat([self.asked[:, :, step.queries - QUERIES :], step.query], 2)

    def settled(self, observed: bool, resident: WorkingSet) -> None:
        """Keep the last few queries only; forget what is due where nothing was observed of what was kept."""
        self.length = resident.length
        if not observed:
            self.begin(resident)
        if self.asked is not None and self.asked.shape[2] > QUERIES:
            self.asked = self.asked[:, :, -QUERIES:].clone()

    def _attention(self, slots: Tensor, scores: Tensor, since: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Return each entry's weight, and which entries have one yet.

        The weight is the mean over the query heads of the lane, and over the queries since the last merging that could
        see the entry: a new one is not thought little of because few came after it.
        """
        queries = (end - torch.maximum(slots, since)).clamp(min=0)
        return scores / (queries.clamp(min=1) * self.readers), (queries > 0) & (slots >= 0)

    # -- merging ------------------------------------------------------------------------------------

    def make_room(self, bank: Bank, new: Arriving, resident: WorkingSet) -> None:
        with self.meter.merging():
            self._make_room(bank, new, resident.banks.lanes)

    def _make_room(self, bank: Bank, new: Arriving, lanes: int) -> None:
        used, device = bank.used, new.keys.device
        if self.since is None:
            self.since = torch.zeros(lanes, 1, dtype=torch.int32, device=device)
        # A single entry is settled before it is attended: no query has seen it, so it does not merge yet.
        end = new.first if new.scores is None else new.first + new.count
        slots = torch.cat([bank.slots[:, :used], new.slots], 1)
        fresh = torch.zeros(new.slots.shape, device=device) if new.scores is None else new.scores
        scores = torch.cat([bank.scored()[:, :used], fresh], 1)
        attention, known = self._attention(slots, scores, bank.of(self.since), end)
        counts = torch.ones(slots.shape, device=device)
        if bank.extra is not None:
            counts[:, :used] += bank.extra[:, :used]
        both = torch.cat([bank.keys[:, :used], new.keys], 1), torch.cat([bank.values[:, :used], new.values], 1)
        entries = Entries(*both, slots, counts * (slots >= 0), attention, known)
        if not new.whole or bank.vacant:
            entries = entries.at(entries.slots.argsort(dim=1, stable=True))
        held = (entries.slots >= 0).sum(1, keepdim=True)
        excess = torch.where(held > bank.columns, (held - bank.columns).clamp(min=self.slack), 0)
        if self.asked is not None and bool(excess.any()):
            entries.clues = self._clues(bank, entries, end)
        with self.meter.holding(*both, *both):  # what is merged, and what it is merged into
            self._write(bank, self._merged(bank, entries, excess, end), excess > 0, end, lanes)

    def _merged(self, bank: Bank, entries: Entries, excess: Tensor, end: int) -> Entries:
        """Return entries of which ``excess`` (lanes, 1) pairs were merged; one pass halves them at most."""
        first = self.ledger.first_by(self.heads)
        start = 0 if first is None else bank.of(first)
        while int(excess.max()) > 0:
            chosen = cheapest(entries, start + self.how.sinks, excess)
            made = chosen.sum(1, keepdim=True)
            if not int(made.sum()):
                raise AssertionError("there is nothing to merge")  # budgets leave room for it
            entries, tally = merge(entries, chosen, self.how, self._turned, self._output(bank, start, end))
            self.tally = self.tally.to(tally.device) + tally
            excess = excess - made
        return entries

    def _output(self, bank: Bank, start: Tensor | int, end: int) -> Tensor | None:
        """Return the layer's mean output since attention was last forgotten, (lanes, 1, value_dim)."""
        if self.outputs is None or self.since is None:
            return None
        queries = (end - torch.maximum(bank.of(self.since), torch.as_tensor(start))).clamp(min=1)
        return (bank.of(self.outputs) / (queries * self.group * self.readers))[:, None]

    @torch.inference_mode(False)
    def _clues(self, bank: Bank, entries: Entries, end: int) -> Tensor:
        """Return what the method makes of the queries of the last slots before ``end``."""
        assert self.asked is not None
        query = bank.of(self.asked)
        groups, count = query.shape[1:3]
        asking = torch.arange(end - count, end, device=query.device).repeat(groups)
        slots = entries.slots[:, None]
        seen = (slots <= asking[:, None]) & (slots >= 0)
        bias = torch.where(seen, entries.counts[:, None].log(), torch.finfo(torch.float32).min)
        real = torch.ones(len(query), len(asking), 1, device=query.device)
        if (visible := self.ledger.visible_by(self.heads)) is not None:
            real *= bank.of(visible)[:, 0, 0, asking][..., None]
        query, keys, values = (part.float().clone() for part in (query.flatten(1, 2), entries.keys, entries.values))
        asked = Asked(query, keys, values, bias, real, self.scaling, BLOCK)
        weights = 4 * GRADIENTS * len(query) * min(BLOCK, len(asking)) * slots.shape[2]
        self.meter.hold(weights)
        with self.meter.holding(query, keys, values, bias, real):
            clues = self.how.clues(asked)
        self.meter.hold(-weights)
        return clues

    def _turned(self, keys: Tensor, by: Tensor) -> Tensor:
        """Return keys (lanes, n, dim) as they would be ``by`` (lanes, n) positions later."""
        by_head = keys[:, None]
        return self.adapter.turn(self.layer, by_head, self.adapter.angles(self.layer, by_head, by.long()))[:, 0]

    def _write(self, bank: Bank, entries: Entries, merged: Tensor, end: int, lanes: int) -> None:
        """Put entries into a bank, its last column used in every lane; what was observed is forgotten, in time, where
        there was merging."""
        held = (entries.slots >= 0).sum(1)
        most, least = int(held.max()), int(held.min())
        assert most <= bank.columns
        stop, span = entries.slots.shape[1], slice(0, most)
        last = slice(stop - most, stop)
        bank.keys[:, span], bank.values[:, span] = entries.keys[:, last], entries.values[:, last]
        bank.slots[:, most:] = -1
        bank.slots[:, span] = entries.slots[:, last]
        if bank.extra is None:
            bank.extra = torch.zeros(bank.slots.shape, device=bank.slots.device)
        bank.extra.zero_()[:, span] = (entries.counts[:, last] - 1).clamp(min=0)
        assert self.since is not None
        queries = (end - torch.maximum(entries.slots, bank.of(self.since))).clamp(min=0)
        scores = entries.attention * queries * self.readers
        bank.scores = torch.zeros(bank.slots.shape, device=bank.slots.device)
        bank.scores[:, span] = scores[:, last]
        bank.used, bank.vacant = most, most - least
        if self.due is None:
            self.due = torch.zeros_like(self.since)
        self.due[bank.index] = torch.where(merged, end, bank.of(self.due)).int()

    def merged(self) -> tuple[int, int]:
        pairs, clamped = self.tally.tolist()
        return int(pairs), int(clamped)

    # -- the cache contract -------------------------------------------------------------------------

    def truncate(self, length: int, resident: WorkingSet) -> None:
        """An entry that stood for a forgotten slot is gone, with the other slots that it stood for: what was before it
        moves up."""
        before, self.length = self.length, min(self.length, length)
        if length >= before:
            return
        if self.asked is not None:
            kept = self.asked.shape[2] - (before - length)
            self.asked = self.asked[:, :, :kept].clone() if kept > 0 else None
        for counted in (self.since, self.due, self.lost):
            if counted is not None:
                counted.clamp_(max=length)
        for bank in resident.banks:
            if bank.extra is None or not bank.used:
                continue
            after = bank.slots[:, : bank.used].amax(1, keepdim=True) + 1
            gap = torch.where(after > 0, length - after, 0)
            if bool(gap.any()):
                used = bank.keys[:, : bank.used]
                used.copy_(self._turned(used.float(), gap.expand(-1, bank.used)))
                self.lost = lost_by_rollback(self.lost, bank, resident.banks.lanes, after, length)

    def select(self, lanes: Tensor) -> None:
        for name in _BY_LANE:
            if (rows := getattr(self, name)) is not None:
                setattr(self, name, rows.index_select(0, lanes.to(rows.device)))

    @property
    def bookkeeping_bytes(self) -> int:
        return nbytes(self.tally, *(getattr(self, name) for name in _BY_LANE))

    def state(self) -> dict[str, Tensor]:
        saved = {name: rows for name in _BY_LANE if (rows := getattr(self, name)) is not None}
        scaling = torch.tensor([self.scaling], dtype=torch.float64)
        counts = torch.tensor([self.length, self.heads, self.group])
        return saved | {"tally": self.tally, "scaling": scaling, "counts": counts}

    def restore(self, state: dict[str, Tensor]) -> None:
        for name in _BY_LANE:
            setattr(self, name, state.get(name))
        self.tally = state["tally"]
        self.scaling = float(state["scaling"][0])
        self.length, self.heads, self.group = state["counts"].tolist()

    def check(self, extent: Extent) -> None:
        lanes, slots = extent.lanes, extent.slots
        fits("tally", self.tally, (2,), torch.float64)
        if (self.length, self.heads) != (slots, lanes // self.ledger.batch):
            raise Misfit(f"merging is not of {slots} slots")
        for name, columns in (("since", 1), ("due", 1), ("lost", None)):
            if (counted := getattr(self, name)) is not None:
                within(name, fits(name, counted, (lanes, columns), torch.int32), 0, slots + 1)
        if self.lost is not None:
            within("lost", self.lost.shape[1] % 2, 0, 1)
        if self.outputs is not None:
            fits("outputs", self.outputs, (lanes, extent.value_dim), torch.float32)
        if self.asked is not None:
            fits("asked", self.asked, (lanes, self.queried, None, extent.key_dim))
            within("asked", self.asked.shape[2], 1, min(QUERIES, slots) + 1)

    def states(self, lanes: int, length: int) -> Tensor:
        return mark_lost(merged_states(self.ledger, lanes, length), self.lost)


def lost_by_rollback(lost: Tensor | None, bank: Bank, lanes: int, after: Tensor, length: int) -> Tensor:
    """Return ``lost`` (lanes, 2 n) int32, slots from..to that rollbacks took with others, and those of one bank from
    ``after`` (its lanes, 1) to ``length``."""
    span = torch.zeros(lanes, 2, dtype=torch.int32, device=after.device)
    span[bank.index] = torch.cat([after, after.new_full(after.shape, length)], 1).int()
    return span if lost is None else torch.cat([lost, span], 1)


def mark_lost(codes: Tensor, lost: Tensor | None) -> Tensor:
    """Return codes (lanes, slots) with the slots that rollbacks took with others marked as dropped."""
    if lost is not None:
        slots = torch.arange(codes.shape[1])
        for span in lost.cpu().unflatten(1, (-1, 2)).unbind(1):
            codes[(slots >= span[:, :1]) & (slots < span[:, 1:])] = int(EntryState.DROPPED)
    return codes
