"""The layer of draft and verify: what is resident is what drafts attend to.

In an exact pass attention runs over the log, page by page, and what is new. In a draft pass it runs over the resident
entries and the drafted ones, which lie in the *tail*: columns behind the resident ones, part of the budget. A verifying
pass is an exact one whose entries wait in the tail, over the drafted ones, until it is known how many of them stay.

An entry may be resident again when attention returns to it: after a draft went wrong, the resident ones are chosen anew
from all, by the attention of the tokens that were verified.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend, received
from kvkeep.stores.banks import Bank
from kvkeep.stores.checkpoints import Checkpoint, expanded
from kvkeep.stores.logged import LoggedLayer
from kvkeep.stores.meter import nbytes
from kvkeep.stores.parts import Parts
from kvkeep.stores.streamed import Step, StreamedLayer, fresh

VOTERS = 32
"""Queries at most that are remembered to choose the resident entries anew."""


class Phase(Enum):
    """What a forward pass is for."""

    EXACT = "exact"  # over everything; what it reads stays
    DRAFT = "draft"  # over what is resident; what it reads is taken back
    VERIFY = "verify"  # over everything; what it reads waits for a decision


@dataclass
class Round:
    """The round of draft and verify a cache is in, shared by its layers. ``tail``: the most entries that may wait."""

    tail: int
    phase: Phase = Phase.EXACT


@dataclass
class _Voters:
    """The last queries of an exact pass by lane, the log-sum-exp of their scores, and the slot of the first."""

    module: Any
    query: Tensor  # (lanes, heads, queries, dim)
    lse: Tensor  # (lanes, heads, queries)
    scaling: float
    first: int


class DraftingLayer(LoggedLayer):
    """A :class:`LoggedLayer` that attends as ``round`` wants it."""

    def __init__(self, parts: Parts, log: Checkpoint, round: Round) -> None:
        super().__init__(parts, log, round.tail)
        self.round = round
        self.waiting = 0  # entries in the tail
        self._voters: _Voters | None = None

    @property
    def arrived(self) -> int:
        """Slots that came in, those in the tail included."""
        return self.length + self.waiting

    @property
    def chooses(self) -> bool:
        """Whether the resident entries can be chosen anew from all: the selector goes by attention alone, what left is
        nowhere but in the log, and the log can be read without computing."""
        return self.fate.forgets and self.log.copies and self.selector.watches != 0 and not self.selector.reads

    # -- a forward pass -----------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new entries in hand and return them; attention adds the past itself."""
        if self.round.phase is Phase.EXACT:
            return super().update(key_states, value_states)
        return StreamedLayer.update(self, key_states, value_states)

    def attend(self, step: Step) -> Tensor:
        """Attend as the round wants it."""
        if self.round.phase is Phase.DRAFT:
            return self._draft(step)
        output, lse = attend(step.query, self.everything(step), step.scaling)
        own, lse = self.folded(step), self.by_lane(lse)
        if self.selector.watches != 0:
            self._remember(own, lse)
        if self.round.phase is Phase.EXACT:
            self.attended(own, lse)
        elif step.last:
            self._stash()
        return output

    def _draft(self, step: Step) -> Tensor:
        """Attend one query a row over what is resident, what the fate keeps, and the tail."""
        self._stash()
        query = self.by_lane(step.query)
        segments = []
        for bank in self.banks:
            stop, mask = bank.used + self.waiting, None
            if bank.vacant:
                mask = torch.ones(len(bank.slots), 1, 1, stop, dtype=torch.bool, device=query.device)
                mask[..., : bank.used] = (bank.slots[:, : bank.used] >= 0)[:, None, None]
            rows = bank.keys[:, None, :stop], bank.values[:, None, :stop]
            segments.append(Segment(*expanded(step.module, *rows), mask, rows=bank.lanes))
        for slots, holes, keys, values in self.fate.recall(self, query):
            segments.append(Segment(*expanded(step.module, keys, values), self.seen(slots, holes, None)))
        return attend(query, segments, step.scaling)[0].reshape(*step.query.shape[:-1], -1)

    def _stash(self) -> None:
        """Put the entries in hand into the tail."""
        if self.pending is None:
            return
        (keys, values), self.pending = self.pending, None
        keys, values, count = keys.flatten(0, 1), values.flatten(0, 1), keys.shape[2]
        for bank in self.banks:
            span = slice(bank.used + self.waiting, bank.used + self.waiting + count)
            bank.keys[:, span], bank.values[:, span] = bank.of(keys), bank.of(values)
        self.waiting += count

    # -- the end of a round -------------------------------------------------------------------------

    def commit(self, count: int, agreed: bool) -> None:
        """Keep the first ``count`` of the verified entries that wait. ``agreed``: the draft was right throughout; if it
        was not, :meth:`choose` will follow, and what they attended to is learnt there."""
        keys, values = self._waiting(count)
        self.waiting, voters = 0, self._voters
        self.pending = keys, values
        self._new_marks = {}
        self._reserve(count)
        if voters is not None:
            voters.query, voters.lse = voters.query[:, :, :count], voters.lse[:, :, :count]
            if agreed or not self.chooses:
                new = Segment(*expanded(voters.module, keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None]))
                held = self.held_segments(voters.module, None)
                own = fresh(voters.query, new.key, new.value, None)
                self.observe(voters.query, voters.lse, voters.scaling, held, own)
            elif not self.selector.enters:
                for number, bank in enumerate(self.banks):
                    self._new_marks[number] = torch.zeros(len(bank.slots), count, device=keys.device)
        self.settle()

    def choose(self) -> None:
        """Choose the resident entries anew from all that there are, if their number is more than the budget."""
        voters, self._voters = self._voters, None
        if voters is None or not self.chooses or all(bank.columns >= self.length for bank in self.banks):
            return
        if self.visible is not None:  # padding attends to something, too, and must not count
            span = slice(voters.first, voters.first + voters.query.shape[2])
            voters.lse = voters.lse.masked_fill(~self.visible[:, :, 0, span], float("inf"))
        received_by = self._votes(voters)
        slots = torch.arange(self.length, dtype=torch.int32, device=received_by.device).expand(len(received_by), -1)
        if self.visible is not None:
            slots = slots.masked_fill(~self.visible[:, 0, 0, : self.length], -1)
            received_by = received_by.masked_fill(slots < 0, 0.0)
        moves = [self._chosen(bank, bank.of(slots), bank.of(received_by), voters.query.shape[2]) for bank in self.banks]
        for bank, (lane, column, slot) in zip(self.banks, moves, strict=True):
            source = lane if bank.lanes is None else bank.lanes[lane]
            bank.keys[lane, column], bank.values[lane, column] = self.log.pick(self.index, source, slot)

    def _votes(self, voters: _Voters) -> Tensor:
        """Return how much attention each slot got from the voters, (lanes, slots)."""
        parts, queries = [], voters.query.shape[2]
        for start, keys, values in self.log.recall(self.index, self.length):
            stop, mask = start + keys.shape[-2], None
            if stop > voters.first:
                rows = torch.arange(voters.first, voters.first + queries, device=keys.device)
                mask = (torch.arange(start, stop, device=keys.device) <= rows[:, None])[None, None]
            keys, values = expanded(voters.module, keys, values)
            segment = Segment(self.by_lane(keys), self.by_lane(values), mask)
            parts.append(received(voters.query, segment, voters.lse, voters.scaling, most=self.selector.most))
        return torch.cat(parts, 1)

    def _chosen(self, bank: Bank, slots: Tensor, weights: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        """Note in ``bank`` which slots are resident from now on; return lane, column and slot of those that return."""
        lanes, columns, device = len(slots), bank.columns, slots.device
        held = bank.slots >= 0
        where = torch.where(held, bank.slots, self.length).long()  # empty columns: one place behind
        marks = torch.zeros(lanes, self.length + 1, device=device).scatter_(1, where, bank.noted())[:, :-1]
        entries = self.candidates(bank, slots, marks, self.length, queries)
        marks = self.selector.observe(entries, weights, queries)
        rank = self.selector.rank(replace(entries, marks=marks)).float()
        rank = rank.masked_fill(slots < 0, float("-inf"))
        best = rank.topk(min(columns, self.length), dim=1, sorted=False)
        wanted = torch.zeros(lanes, self.length + 1, dtype=torch.bool, device=device)
        wanted.scatter_(1, best.indices.masked_fill(best.values == float("-inf"), self.length), True)
        wanted[:, -1] = False
        stays = wanted.gather(1, where)
        wanted.scatter_(1, where.masked_fill(~stays, self.length), False)  # what comes back
        lane, slot = wanted.nonzero(as_tuple=True)
        number = wanted.cumsum(1)[lane, slot] - 1
        column = stays.int().argsort(dim=1, stable=True)[lane, number]
        bank.slots.masked_fill_(~stays, -1)
        bank.slots[lane, column] = slot.int()
        bank.marks = marks.gather(1, bank.slots.clamp(min=0).long())
        bank.used = columns
        bank.vacant = int((bank.slots < 0).sum(1).max())
        return lane, column, slot

    def _waiting(self, count: int) -> tuple[Tensor, Tensor]:
        """Return copies of the first entries of the tail, (batch, kv_heads, count, dim)."""
        bank = self.banks[0]
        parts = []
        for name in ("keys", "values"):
            whole = getattr(bank, name).new_empty(self.lanes, count, getattr(bank, name).shape[2])
            for bank in self.banks:
                rows = getattr(bank, name)[:, bank.used : bank.used + count]
                whole[slice(None) if bank.lanes is None else bank.lanes] = rows
            parts.append(whole.unflatten(0, (-1, self.heads)))
        return parts[0], parts[1]

    def _remember(self, own: Step, lse: Tensor) -> None:
        last = own.query.shape[2]
        if self.round.phase is Phase.EXACT:
            last = min(last, VOTERS, self.selector.watches or VOTERS)
        first = self.length + own.new - last
        query, lse = own.query[:, :, -last:].clone(), lse[:, :, -last:].clone()
        self._voters = _Voters(own.module, query, lse, own.scaling, first)

    # -- the cache contract -------------------------------------------------------------------------

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on, those in the tail first."""
        self.waiting = max(0, min(self.waiting, length - self.length))
        if length < self.length:
            self._voters = None
        super().truncate(length)

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""
        self._voters = None
        super().select(index)

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes of slots and marks, and of the queries that will choose."""
        voters = () if self._voters is None else (self._voters.query, self._voters.lse)
        return super().bookkeeping_bytes + nbytes(*voters)
