"""The layer in which neighbours become one entry: nothing leaves, the least attended are merged (AsymKV, KVSlimmer).

Entries lie in the order of the text. New ones are appended until the budget is full; then the cheapest disjoint pairs
of neighbours are merged at once, so that the work is paid once for many tokens. A pair's values are added up and held
as their mean beside their count (:mod:`kvkeep.stores.counted`); how its key is made is the method's
(:class:`Merging`).

Positions are the running sum of the counts (AsymKV), counted from the end: an entry's position is the next token's less
the counts from it on. Rotary attention sees differences only, so queries and new keys keep the model's own positions,
and a key is turned only when it is merged, or when a capped count brings it nearer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kvkeep.models.adapter import Adapter
from kvkeep.stores.banks import Bank
from kvkeep.stores.counted import CountedLayer
from kvkeep.stores.meter import nbytes
from kvkeep.stores.pairing import cheapest_pairs
from kvkeep.stores.parts import Parts
from kvkeep.stores.streamed import Step
from kvkeep.stores.whereabouts import Whereabouts

QUERIES = 32
"""Queries kept while decoding, for methods that ask anew what they attend to."""

BLOCK = 128
"""Queries (of one head) whose weights stand in memory at once."""

GRADIENTS = 4
"""Matrices of that size that a method with gradients holds at once: scores, weights, and the gradients of both."""


@dataclass(frozen=True)
class Pairs:
    """Neighbours to be merged, the first and the second of each. Tensors are (lanes, pairs, ...).

    keys: as at the position of the first, float32. values: means. attention: the weight of each, its count included,
    as :meth:`MergedLayer.attention` says. output: (lanes, 1, value_dim), the layer's, averaged in the same way; clues:
    what :meth:`Merging.clues` made of each entry; each None where the method is not told of it. real: (lanes, pairs),
    which are pairs at all.
    """

    keys: tuple[Tensor, Tensor]
    values: tuple[Tensor, Tensor]
    attention: tuple[Tensor, Tensor]
    output: Tensor | None
    clues: tuple[Tensor, Tensor] | None
    real: Tensor


@dataclass(frozen=True)
class Asked:
    """The last queries of a layer and all its entries, float32, ready for a gradient.

    query: (lanes, queries, dim), all heads of the group. keys, values: (lanes, entries, dim). bias: what is added to
    the scores, (lanes, queries, entries): the logarithm of the counts, and a very large negative number where a query
    comes before the entry. real: (lanes, queries, 1), 0 for padding.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor
    real: Tensor
    scaling: float

    def weights(self, keys: Tensor) -> Tensor:
        """Return the weights of attention with ``keys``, (lanes, queries, entries)."""
        return torch.baddbmm(self.bias, self.query, keys.transpose(1, 2), alpha=self.scaling).softmax(-1)

    def blocks(self) -> Iterator[Asked]:
        """Yield the same, :data:`BLOCK` queries at a time."""
        parts = zip(*(part.split(BLOCK, 1) for part in (self.query, self.bias, self.real)), strict=True)
        return (Asked(query, self.keys, self.values, bias, real, self.scaling) for query, bias, real in parts)


class Merging(Protocol):
    """What a layer asks of its method; :mod:`kvkeep.policies.merging` has them.

    asks: whether it works by :meth:`clues`, from the queries themselves; else it is told the mean output.
    """

    asks: ClassVar[bool]

    @property
    def sinks(self) -> int:
        """First entries of a row that are never merged."""

    @property
    def cap(self) -> int:
        """The largest count, 0 for none."""

    @property
    def slack(self) -> float:
        """Pairs merged at once while decoding, as a share of the budget, or (from 1 on) their number."""

    def share(self, pairs: Pairs) -> Tensor:
        """Return the first key's share of the merged one, (lanes, pairs, 1 or dim); the second's is the rest. What is
        outside [0, 1], or no number, is clamped and counted."""

    def clues(self, asked: Asked) -> Tensor:
        """Return what it has to know of each entry, (lanes, entries, any); a merged entry has the sum of both."""


@dataclass
class Entries:
    """What a pass works on: entries of all lanes of a bank in the order of the text, holes (slot -1) first.

    counts: float32, as capped. attention: float32; known: whether any query has seen the entry yet.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    counts: Tensor
    attention: Tensor
    known: Tensor
    clues: Tensor | None = None

    def at(self, index: Tensor) -> Entries:
        """Return the entries at ``index`` (lanes, n)."""
        held = ((field.name, getattr(self, field.name)) for field in fields(self))
        return Entries(**{name: _gathered(part, index) for name, part in held if part is not None})

    def after(self, at: Tensor, real: Tensor, **merged: Tensor) -> Entries:
        """Return the entries with some fields written anew at ``at`` (lanes, n), where ``real``."""
        return replace(self, **{name: _written(getattr(self, name), at, new, real) for name, new in merged.items()})


class MergedLayer(CountedLayer):
    """Holds its budget of entries in each KV head at most, those of the first ``sinks`` tokens as they came.

    Its selector is one that adds up all attention, as H2O's does; it is not asked to rank.

    An entry goes by the last slot it stands for. ``readers``: layers that read these entries. ``tally``: pairs merged
    so far, and shares that had to be clamped (float64, on the device).
    """

    def __init__(self, parts: Parts, merging: Merging, adapter: Adapter, readers: int = 1) -> None:
        super().__init__(parts)
        self.merging, self.adapter, self.readers = merging, adapter, readers
        self.slack = slack_of(merging, min(self.budgets))
        self.tally = torch.zeros(2, dtype=torch.float64)
        self.since: Tensor | None = None  # (lanes, 1) int32: the slots there were when attention was last forgotten
        self.due: Tensor | None = None  # (lanes, 1) int32: what that is once more is heard, 0 where it stays
        self.outputs: Tensor | None = None  # (lanes, value_dim): outputs of all heads and queries added up since
        self.asked: Tensor | None = None  # (lanes, heads of the group, n, dim): the queries of the last n slots
        self.scaling, self.group = 1.0, 1  # of scores; heads of a group
        self.lost: Tensor | None = None  # (lanes, 2 n) int32: slots from..to that a rollback took with others

    # -- what is heard ------------------------------------------------------------------------------

    def attend(self, step: Step) -> Tensor:
        """Attend by lanes, and note what the merging will have to know of it."""
        self.scaling, self.group = step.scaling, step.query.shape[1] // self.heads
        if step.own and not self.alone(step):
            self._forget()
        output = super().attend(replace(step, last=False))
        if self.merging.asks:
            self._ask(step)
        else:
            self._hear(output)
        if step.last:
            self.settle()
            if self.asked is not None and self.asked.shape[2] > QUERIES:
                self.asked = self.asked[:, :, -QUERIES:].clone()
        return output

    def settle(self) -> None:
        """Keep the entries in hand, merging where there is no room for them."""
        unheard = self.pending is not None and not self._new_marks
        super().settle()
        if unheard:
            self._forget()

    def _forget(self) -> None:
        """Forget what was heard before the last merging: done when more is about to be heard, so that there is always
        something to merge by."""
        if self.due is None or self.since is None:
            return
        kept = self.due == 0
        self.since, self.due = torch.where(kept, self.since, self.due), None
        for bank in self.banks:
            if bank.marks is not None:
                bank.marks *= bank.of(kept)
        if self.outputs is not None:
            self.outputs *= kept

    def _ask(self, step: Step) -> None:
        """Keep a step's queries: a chunk's until its entries have been merged, then the last few."""
        query = self.by_lane(step.query)
        if self.asked is None or query.shape[2] >= QUERIES or not step.own:
            self.asked = query
        else:
            self.asked = torch.cat([self.asked[:, :, query.shape[2] - QUERIES :], query], 2)

    def _hear(self, output: Tensor) -> None:
        by_head = self.by_lane(output).float()  # (lanes, heads of the group, queries, value_dim)
        if (visible := self.visible) is not None:
            by_head = by_head * visible[..., -by_head.shape[2] :].transpose(2, 3)
        heard = by_head.sum((1, 2))
        self.outputs = heard if self.outputs is None else self.outputs.add_(heard)

    def attention(self, slots: Tensor, marks: Tensor, since: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Return each entry's weight, and which entries have one yet.

        The weight is the mean over the query heads of the lane, and over the queries since the last merging that could
        see the entry: a new one is not thought little of because few came after it.
        """
        queries = (end - torch.maximum(slots, since)).clamp(min=0)
        return marks / (queries.clamp(min=1) * self.readers), (queries > 0) & (slots >= 0)

    # -- merging ------------------------------------------------------------------------------------

    def _settle(self, bank: Bank, keys: Tensor, values: Tensor, marks: Tensor | None, whole: bool) -> None:
        """Append new entries; where there is no room, merge first."""
        if whole and bank.used + keys.shape[1] <= bank.columns:
            self._append(bank, keys, values, marks)
            return
        with self.meter.merging():
            self._make_room(bank, keys, values, marks, whole)

    def _make_room(self, bank: Bank, keys: Tensor, values: Tensor, marks: Tensor | None, whole: bool) -> None:
        """Merge what is held and what is new until it fits, and write it."""
        used, count, lanes = bank.used, keys.shape[1], bank.slots.shape[0]
        device = keys.device
        if self.since is None:
            self.since = torch.zeros(self.lanes, 1, dtype=torch.int32, device=device)
        # A single entry is settled before it is attended: no query has seen it, so it does not merge yet.
        end = self.length if marks is None else self.length + count
        slots = torch.cat([bank.slots[:, :used], self._new_slots(bank, count)], 1)
        fresh = torch.zeros(lanes, count, device=device) if marks is None else marks
        heard, known = self.attention(slots, torch.cat([bank.noted()[:, :used], fresh], 1), bank.of(self.since), end)
        counts = torch.ones(lanes, used + count, device=device)
        if bank.others is not None:
            counts[:, :used] += bank.others[:, :used]
        both = torch.cat([bank.keys[:, :used], keys], 1), torch.cat([bank.values[:, :used], values], 1)
        entries = Entries(*both, slots, counts * (slots >= 0), heard, known)
        if not whole or bank.vacant:
            entries = entries.at(entries.slots.argsort(dim=1, stable=True))
        held = (entries.slots >= 0).sum(1, keepdim=True)
        excess = torch.where(held > bank.columns, (held - bank.columns).clamp(min=self.slack), 0)
        if self.asked is not None and bool(excess.any()):
            entries.clues = self._clues(bank, entries, end)
        with self.meter.holding(*both, *both):  # what is merged, and what it is merged into
            self._write(bank, self._merged(bank, entries, excess, end), excess > 0, end)

    def _merged(self, bank: Bank, entries: Entries, excess: Tensor, end: int) -> Entries:
        """Return entries of which ``excess`` (lanes, 1) pairs were merged; one pass halves them at most."""
        start = self._first(bank)
        while int(excess.max()) > 0:
            may = entries.known & (entries.slots >= start + self.merging.sinks)
            cost = (entries.attention + entries.attention.roll(-1, 1)).masked_fill(~(may & may.roll(-1, 1)), torch.inf)
            cost[:, -1] = torch.inf
            chosen = cheapest_pairs(cost, excess)
            made = chosen.sum(1, keepdim=True)
            if not int(made.sum()):
                raise AssertionError("there is nothing to merge")  # budgets leave room for it
            entries = self._pass(bank, entries, chosen, int(made.max()), end)
            excess = excess - made
        return entries

    def _first(self, bank: Bank) -> Tensor | int:
        """Return the first slot of each lane's row that is no padding, (lanes, 1)."""
        first = self.ledger.first
        return 0 if first is None else bank.of(first.repeat_interleave(self.heads, 0))[:, None]

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
        if self.visible is not None:
            real *= bank.of(self.visible)[:, 0, 0, asking][..., None]
        query, keys, values = (part.float().clone() for part in (query.flatten(1, 2), entries.keys, entries.values))
        asked = Asked(query, keys, values, bias, real, self.scaling)
        weights = 4 * GRADIENTS * len(query) * min(BLOCK, len(asking)) * slots.shape[2]
        self.meter.hold(weights)
        with self.meter.holding(query, keys, values, bias, real):
            clues = self.merging.clues(asked)
        self.meter.hold(-weights)
        return clues

    def _pass(self, bank: Bank, entries: Entries, chosen: Tensor, pairs: int, end: int) -> Entries:
        """Merge the ``chosen`` pairs, ``pairs`` in a lane at most, and close the gaps."""
        at = (~chosen).int().argsort(dim=1, stable=True)[:, :pairs]
        real = chosen.gather(1, at)
        one, two = entries.at(at), entries.at(at + real)  # where it is no pair, the entry and itself
        dtype, keys = entries.keys.dtype, one.keys.float()
        second = self._turned(two.keys.float(), -one.counts)
        mean, clues, values = None, None, (one.values.float(), two.values.float())
        if self.outputs is not None and self.since is not None:
            queries = (end - torch.maximum(bank.of(self.since), torch.as_tensor(self._first(bank)))).clamp(min=1)
            mean = (bank.of(self.outputs) / (queries * self.group * self.readers))[:, None]
        if one.clues is not None and two.clues is not None:
            clues = one.clues, two.clues
        share = self.merging.share(Pairs((keys, second), values, (one.attention, two.attention), mean, clues, real))
        bad = real[..., None] & ~((share >= 0) & (share <= 1))
        share = share.nan_to_num(nan=0.5).clamp(0, 1)
        self.tally = self.tally.to(share.device)
        self.tally += torch.stack([real.sum(), bad.any(2).sum()])
        counts = one.counts + two.counts
        total = one.counts[..., None] * values[0] + two.counts[..., None] * values[1]
        counts = counts.clamp(max=self.merging.cap) if self.merging.cap else counts
        result = entries.after(
            at,
            real,
            keys=(share * keys + (1 - share) * second).to(dtype),
            values=(total / counts.clamp(min=1)[..., None]).to(dtype),
            slots=two.slots,
            counts=counts,
            attention=one.attention + two.attention,
            **({} if clues is None else {"clues": clues[0] + clues[1]}),
        )
        gone = torch.nn.functional.pad(chosen, (1, 0))[:, :-1]
        result.slots, result.counts = result.slots.masked_fill(gone, -1), result.counts.masked_fill(gone, 0)
        if self.merging.cap:
            # A count that was cut brings what is before it nearer.
            nearer = _from_end(entries.counts) - _from_end(result.counts)
            if bool(nearer.any()):
                result.keys = self._turned(result.keys.float(), nearer).to(dtype)
        return result.at(result.slots.argsort(dim=1, stable=True))

    def _turned(self, keys: Tensor, by: Tensor) -> Tensor:
        """Return keys (lanes, n, dim) as they would be ``by`` (lanes, n) positions later."""
        by_head = keys[:, None]
        return self.adapter.turn(self.index, by_head, self.adapter.angles(self.index, by_head, by.long()))[:, 0]

    def _write(self, bank: Bank, entries: Entries, merged: Tensor, end: int) -> None:
        """Put entries into a bank, its last column used in every lane; what was heard is forgotten, in time, where
        there was merging."""
        held = (entries.slots >= 0).sum(1)
        most, least = int(held.max()), int(held.min())
        assert most <= bank.columns
        stop, span = entries.slots.shape[1], slice(0, most)
        last = slice(stop - most, stop)
        bank.keys[:, span], bank.values[:, span] = entries.keys[:, last], entries.values[:, last]
        bank.slots[:, most:] = -1
        bank.slots[:, span] = entries.slots[:, last]
        if bank.others is None:
            bank.others = torch.zeros(bank.slots.shape, device=bank.slots.device)
        bank.others.zero_()[:, span] = (entries.counts[:, last] - 1).clamp(min=0)
        assert self.since is not None
        since = bank.of(self.since)
        queries = (end - torch.maximum(entries.slots, since)).clamp(min=0)
        marks = entries.attention * queries * self.readers
        bank.marks = torch.zeros(bank.slots.shape, device=bank.slots.device)
        bank.marks[:, span] = marks[:, last]
        bank.used, bank.vacant = most, most - least
        own = slice(None) if bank.lanes is None else bank.lanes
        if self.due is None:
            self.due = torch.zeros_like(self.since)
        self.due[own] = torch.where(merged, end, bank.of(self.due)).int()

    # -- the cache contract -------------------------------------------------------------------------

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on. An entry that stands for one of them cannot be split: it goes, with the
        other slots that it stood for, and what was before it moves up."""
        before = self.length
        super().truncate(length)
        if length >= before:
            return
        if self.asked is not None:
            kept = self.asked.shape[2] - (before - length)
            self.asked = self.asked[:, :, :kept].clone() if kept > 0 else None
        for counted in (self.since, self.due, self.lost):
            if counted is not None:
                counted.clamp_(max=length)
        for bank in self.banks:
            if bank.others is None:
                continue
            bank.others.masked_fill_(bank.slots < 0, 0.0)
            slots = bank.slots[:, : bank.used]
            if not bank.used:
                continue
            after = slots.amax(1, keepdim=True) + 1
            gap = torch.where(after > 0, length - after, 0)
            if bool(gap.any()):
                used = bank.keys[:, : bank.used]
                used.copy_(self._turned(used.float(), gap.expand(-1, bank.used)))
                self._lose(bank, after, length)

    def _lose(self, bank: Bank, start: Tensor, stop: int) -> None:
        lost = torch.zeros(self.lanes, 2, dtype=torch.int32, device=start.device)
        lost[slice(None) if bank.lanes is None else bank.lanes] = torch.cat(
            [start, start.new_full(start.shape, stop)], 1
        )
        self.lost = lost if self.lost is None else torch.cat([self.lost, lost], 1)

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""
        super().select(index)
        for name in _BY_LANE:
            if (rows := getattr(self, name)) is not None:
                by_row = rows.unflatten(0, (-1, self.heads)).index_select(0, index.to(rows.device))
                setattr(self, name, by_row.flatten(0, 1))

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes allocated for slots, counts, and what was heard."""
        return super().bookkeeping_bytes + nbytes(self.tally, *(getattr(self, name) for name in _BY_LANE))

    def state(self) -> dict[str, Tensor]:
        """Return what must be saved."""
        own = {name: getattr(self, name) for name in _BY_LANE}
        return super().state() | {name: rows for name, rows in own.items() if rows is not None}

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Take what :meth:`state` gave."""
        super().restore(state, length)
        for name in _BY_LANE:
            setattr(self, name, state.get(name))

    def whereabouts(self, length: int) -> Tensor:
        """Return what became of every slot: (batch, kv_heads, ``length``) codes, on the CPU."""
        codes = super().whereabouts(length)
        if self.lost is not None:
            slots = torch.arange(length)
            for span in self.lost.cpu().unflatten(1, (-1, 2)).unbind(1):
                gone = (slots >= span[:, :1]) & (slots < span[:, 1:])
                codes.view(-1, length)[gone] = Whereabouts.DROPPED
        return codes


_BY_LANE = ("since", "due", "outputs", "asked", "lost")


def slack_of(merging: Any, budget: int) -> int:
    """Return how many pairs are merged at once while decoding, of a ``budget`` of entries: a quarter of those that may
    merge at most."""
    wanted = int(merging.slack) if merging.slack >= 1 else int(merging.slack * budget)
    return max(1, min(wanted, (budget - merging.sinks) // 4))


def _from_end(counts: Tensor) -> Tensor:
    """Return the sum of the counts from each entry on."""
    return counts.flip(1).cumsum(1).flip(1)


def _gathered(rows: Tensor, index: Tensor) -> Tensor:
    return rows.gather(1, index if rows.ndim == 2 else index[..., None].expand(-1, -1, rows.shape[2]))


def _written(rows: Tensor, index: Tensor, new: Tensor, real: Tensor) -> Tensor:
    """Return ``rows`` with ``new`` at ``index`` where ``real``."""
    wide = index if rows.ndim == 2 else index[..., None].expand_as(new)
    own = real if rows.ndim == 2 else real[..., None]
    return rows.scatter(1, wide, torch.where(own, new, rows.gather(1, wide)))
