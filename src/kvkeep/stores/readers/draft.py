"""The reader of draft and verify: drafts attend to the resident entries.

In an exact pass attention runs over the backing, page by page, and the new entries. In a draft pass it runs over the
resident entries, the store of evicted ones, and the drafted ones. These are in the *tail*: columns behind the resident
ones, part of the budget. A verifying pass is an exact one. Its entries replace the drafted ones in the tail, until the
round decides how many of them stay.

An entry may become resident again when attention returns to it: after a wrong draft, the resident entries are chosen
anew from all entries, by the attention of the verified tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.attention import attend, received
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.part import Site
from kvkeep.memory.meter import nbytes
from kvkeep.stores.layer import Layer
from kvkeep.stores.readers.backing import Backed, attended_exactly
from kvkeep.stores.readers.round import Round, RoundPhase
from kvkeep.stores.resident.reselection import reselect

VOTERS = 32
"""The maximum number of queries that are kept to choose the resident entries anew."""


@dataclass(frozen=True)
class _Voters:
    """The last queries of an exact step, and their attention."""

    step: AttentionInputs
    output: Tensor
    """(lanes, heads, queries, value_dim)"""
    lse: Tensor
    """(lanes, heads, queries)"""
    first: int
    """The slot of the first query."""


class DraftAndVerify(Backed):
    """Attends as the phase of its ``round`` says."""

    def __init__(self, site: Site, round: Round) -> None:
        super().__init__(site)
        self.round = round
        self.waiting = 0  # entries in the tail
        self._voters: _Voters | None = None

    def chooses(self, layer: Layer) -> bool:
        """Return whether the resident entries can be chosen anew from all entries: the selector uses only attention,
        only the backing has evicted entries, and reading it takes no computation."""
        store, selector = layer.evicted, layer.resident.selector
        only_backed = not (store.keeps or store.makes_room)
        return only_backed and self.checkpoint.copies and selector.observation_window != 0 and not selector.needs_kv

    # -- a forward pass -----------------------------------------------------------------------------

    def arrive(self, layer: Layer, keys: Tensor, values: Tensor) -> None:
        if not self.round.open:
            layer.resident.arrive(keys, values)

    def attend(self, layer: Layer, step: AttentionInputs) -> Tensor:
        if self.round.phase is RoundPhase.DRAFT:
            return self._draft(layer, step)
        output, lse = self.everything(layer, step)
        self._remember(layer, step, output, lse)
        if self.round.phase is RoundPhase.VERIFY:
            if step.last:
                self._stash(layer)
            return output
        attended_exactly(layer, step, output, lse)
        if step.last:
            layer.finish()
        return output

    def _draft(self, layer: Layer, step: AttentionInputs) -> Tensor:
        """Attend, with one query a row, over the resident entries, the store, and the tail."""
        self._stash(layer)
        banks = [bank for bank in layer.resident.banks if bank.columns and bank.used + self.waiting]
        segments = [layer.segment(bank.piece(self.waiting), step, None) for bank in banks]
        evicted = layer.evicted.pieces(step.query, layer.resident, layer.length)
        segments += [layer.segment(piece, step, None) for piece in evicted]
        return attend(step.query, segments, step.scaling)[0]

    def _stash(self, layer: Layer) -> None:
        """Put the pending entries into the tail of the banks, behind those that wait there."""
        if layer.pending is None:
            return
        (keys, values), layer.pending = layer.pending, None
        for bank in layer.resident.banks:
            span = slice(bank.used + self.waiting, bank.used + self.waiting + keys.shape[1])
            bank.keys[:, span], bank.values[:, span] = bank.of(keys), bank.of(values)
        self.waiting += keys.shape[1]

    def _remember(self, layer: Layer, step: AttentionInputs, output: Tensor, lse: Tensor) -> None:
        last = step.queries
        if self.round.phase is RoundPhase.EXACT:
            if not self.chooses(layer):
                return
            last = min(last, VOTERS, layer.resident.selector.observation_window or VOTERS)
        query, output, lse = (part[:, :, -last:].clone() for part in (step.query, output, lse))
        none = query.new_empty(0)
        first = layer.length + step.new - last
        self._voters = _Voters(replace(step, query=query, key=none, value=none, mask=None), output, lse, first)

    # -- the end of a round -------------------------------------------------------------------------

    def commit(self, layer: Layer, count: int, agreed: bool) -> None:
        """Keep the first ``count`` of the verified entries that wait. agreed: the whole draft was right. If it was not
        and :meth:`choose` follows, that method learns their attention."""
        keys, values = layer.resident.banks.tail_entries(count)
        self.waiting, voters = 0, self._voters
        layer.pending = keys, values
        layer.resident.arrive(keys, values)
        if voters is not None:
            key, value = voters.step.expanded(keys[:, None], values[:, None])
            verified = replace(voters.step, query=voters.step.query[:, :, :count])
            output, lse = voters.output[:, :, :count], voters.lse[:, :, :count]
            self._voters = replace(voters, step=verified, output=output, lse=lse)
            step = replace(verified, key=key, value=value, brings_entries=True, last=True)
            if agreed or not self.chooses(layer):
                attended_exactly(layer, step, output, lse)
        layer.finish()

    def choose(self, layer: Layer) -> None:
        """Choose the resident entries anew from all entries, if these exceed the budget."""
        voters, self._voters = self._voters, None
        if voters is None or not self.chooses(layer) or layer.resident.banks.least_columns >= layer.length:
            return
        step, lse = voters.step, voters.lse
        if (visible := layer.ledger.visible_by(layer.heads)) is not None:
            # Queries of padding also attend; their attention must not count.
            span = slice(voters.first, voters.first + step.queries)
            lse = lse.masked_fill(~visible[:, :, 0, span], float("inf"))
        parts = []
        asking = torch.arange(voters.first, voters.first + step.queries, device=lse.device)
        for piece in self.checkpoint.pieces(layer.index, layer.length):
            segment = layer.segment(piece._replace(slots=None), step, None)
            stop = piece.first + piece.keys.shape[2]
            mask = None
            if stop > voters.first:
                mask = (torch.arange(piece.first, stop, device=lse.device) <= asking[:, None])[None, None]
            parts.append(
                received(
                    step.query, replace(segment, mask=mask), lse, step.scaling, None, layer.resident.selector.reduce
                )
            )
        reselect(
            layer.resident,
            torch.cat(parts, 1),
            step.queries,
            lambda lane, slot: self.checkpoint.pick(layer.index, lane, slot),
        )

    # -- the cache contract -------------------------------------------------------------------------

    def truncate(self, layer: Layer, length: int) -> None:
        self.waiting = max(0, min(self.waiting, length - layer.length))
        if length < layer.length:
            self._voters = None
        super().truncate(layer, length)

    def select(self, layer: Layer, lanes: Tensor) -> None:
        self._voters = None

    @property
    def bookkeeping_bytes(self) -> int:
        voters = self._voters
        return 0 if voters is None else nbytes(voters.step.query, voters.output, voters.lse)
