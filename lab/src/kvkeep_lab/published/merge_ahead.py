"""The entries of one layer, merged before each chunk as in the published code of AsymKV and KVSlimmer.

The attention of a first pass over the chunk (:mod:`kvkeep_lab.published.lookahead`) decides.
:mod:`kvkeep_lab.published.ahead_pairs` chooses and merges the pairs.

Entries are stored in the order of the text. All lanes of a row merge the same pairs. Positions are the running sum of
the counts: counted back from the next token, an entry has the position of its last token if its count is its number of
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.contracts.entries import gathered
from kvkeep.contracts.part import Site
from kvkeep.contracts.resident import WorkingSet
from kvkeep.memory.extent import Extent
from kvkeep.models.adapter import Adapter
from kvkeep.stores.evicted.neighbours import MergesNeighbours
from kvkeep.stores.resident.banks import Bank
from kvkeep.stores.resident.eviction import Arriving
from kvkeep_lab.published.ahead_pairs import AheadMerging, Seen, cheapest, costs, merge


class MergeAhead(MergesNeighbours):
    """Merges pairs of neighbours until the bank has space for a pass's tokens and ``slack`` - 1 more. It ignores the
    selector.

    looks: number of chunks that attended to a lane's entries, (lanes, 1) int32. seen: number of slots at the last of
    them. The banks' scores hold averaged sensitivities.
    """

    by_lane = (*MergesNeighbours.by_lane, "looks", "seen")

    def __init__(self, site: Site, how: AheadMerging, adapter: Adapter, slack: int) -> None:
        super().__init__(site, adapter, slack)
        self.how = how
        self.looks: Tensor | None = None
        self.seen: Tensor | None = None

    def full(self, resident: WorkingSet) -> bool:
        """Return whether a lane is full."""
        return any(bank.used >= bank.budget for bank in resident.banks)

    # -- merging ------------------------------------------------------------------------------------

    def merge_before(
        self, resident: WorkingSet, real: Tensor, received: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Merge entries before a pass over tokens, ``real`` (rows, n) bool. received: attention that the entries of
        each non-empty bank receive from the tokens, (lanes, entries). gradients: gradients by the keys of each bank, if
        any."""
        lanes, heads = resident.banks.lanes, resident.banks.heads
        for name in ("moved", "looks", "seen"):
            if getattr(self, name) is None:
                setattr(self, name, torch.zeros(lanes, 1, dtype=torch.int32, device=real.device))
        arriving = real.sum(1).repeat_interleave(heads)[:, None]
        heard, found = iter(received), iter(gradients)
        with self.meter.merging():
            for bank in resident.banks:
                if bank.used:
                    gradient = next(found) if self.how.gradients else None
                    self._merge_bank(bank, next(heard), gradient, bank.of(arriving), real.shape[1] > 1, heads)

    def _merge_bank(
        self, bank: Bank, heard: Tensor, gradient: Tensor | None, arriving: Tensor, several: bool, heads: int
    ) -> None:
        assert self.looks is not None and self.seen is not None and self.moved is not None
        keys, values, slots, counts, scores = _entries(bank)
        if bank.gaps:
            order = slots.argsort(dim=1, stable=True)
            keys, values, slots, counts, scores, heard = (
                gathered(rows, order) for rows in (keys, values, slots, counts, scores, heard)
            )
            gradient = None if gradient is None else gathered(gradient, order)
        free, used = self.slack - 1, (slots >= 0).sum(1, keepdim=True)
        tight = used + arriving > bank.budget - (free if several else 0)
        merging = (used > 0) & (arriving > 0) & (tight | several)
        excess = torch.where(tight & merging, used + arriving + free - bank.budget, 0)
        places = (counts.cumsum(1) + bank.of(self.moved) - 1).long()
        sums = values.float() * counts[..., None]
        turned_back = None if gradient is None else self._turned(gradient.float(), -places)
        first = self.ledger.first_by(heads)
        start = 0 if first is None else bank.of(first)
        merges = (slots >= start + self.how.sinks) & (slots >= 0)
        seen = Seen(heard * (slots >= 0), sums, merges, turned_back)
        sensitivity = self.how.sensitivity(seen)
        if self.how.averages:
            sensitivity = self._averaged(bank, sensitivity[..., 0], scores, slots, merging)[..., None]
        if bool((excess > 0).any()):
            chosen = cheapest(costs(seen, counts, heads), excess[::heads]).repeat_interleave(heads, 0)
            pairs = chosen.sum()
            self.tally = self.tally.to(pairs.device) + torch.stack([pairs, torch.zeros_like(pairs)])
            unrotated = self._turned(keys.float(), -places)
            with self.meter.holding(unrotated, unrotated, unrotated, sums, sums, turned_back):
                found = merge(unrotated, counts, slots, seen, sensitivity, chosen, self.how)
                changed = excess > 0
                counts, slots, sensitivity = found.counts * found.kept, found.slots, found.sensitivity
                slots = slots.masked_fill(~found.kept, -1)
                moved = self._tokens(bank, heads) - counts.sum(1, keepdim=True)
                places = (counts.cumsum(1) + moved - 1).long()
                keys = torch.where(changed[..., None], self._turned(found.keys, places).to(keys.dtype), keys)
                means = (found.sums / counts.clamp(min=1)[..., None]).to(values.dtype)
                values = torch.where(changed[..., None], means, values)
                self.moved[bank.index] = moved.int()
        scores = sensitivity[..., 0] if self.how.averages else scores
        _write(bank, keys, values, slots, counts, scores)

    def _averaged(self, bank: Bank, new: Tensor, old: Tensor, slots: Tensor, merging: Tensor) -> Tensor:
        """Return the mean of sensitivities over all chunks read, (lanes, entries), in lanes that are ``merging``
        (lanes, 1). An entry that is new to this chunk has only this chunk's sensitivity."""
        assert self.looks is not None and self.seen is not None
        looks, seen = bank.of(self.looks) + merging, bank.of(self.seen)
        share = 1 / looks.clamp(min=1)
        mean = torch.where(slots < seen, share * new + (1 - share) * old, new)
        self.looks[bank.index] = looks.int()
        self.seen[bank.index] = torch.where(merging, self.length, seen).int()
        return torch.where(merging, mean, old)

    def make_room(self, bank: Bank, new: Arriving, resident: WorkingSet) -> None:
        """Append new entries after closing the gaps."""
        keys, values, slots, counts, scores = _entries(bank)
        fresh = torch.zeros(new.slots.shape, device=slots.device)
        _write(
            bank,
            torch.cat([keys, new.keys], 1),
            torch.cat([values, new.values], 1),
            torch.cat([slots, new.slots], 1),
            torch.cat([counts, (new.slots >= 0).float()], 1),
            torch.cat([scores, fresh], 1),
        )

    # -- the cache contract -------------------------------------------------------------------------

    def truncate(self, length: int, resident: WorkingSet) -> None:
        if self.seen is not None:
            self.seen.clamp_(max=length)
        super().truncate(length, resident)

    def check(self, extent: Extent) -> None:
        super().check(extent)
        for name in ("looks", "seen"):
            self._counted(name, extent)


def _entries(bank: Bank) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return keys, values, slots, counts and scores of the columns in use."""
    used = bank.used
    return bank.keys[:, :used], bank.values[:, :used], bank.slots[:, :used], bank.counts(), bank.scored()[:, :used]


def _write(bank: Bank, keys: Tensor, values: Tensor, slots: Tensor, counts: Tensor, scores: Tensor) -> None:
    """Write entries to a bank in the order of the text; the last column is used in every lane."""
    used = (slots >= 0).sum(1)
    longest, shortest = int(used.max()), int(used.min())
    assert longest <= bank.columns
    last = slots.argsort(dim=1, stable=True)[:, slots.shape[1] - longest :]
    extra = torch.zeros(bank.slots.shape, device=slots.device)
    fresh = torch.zeros_like(extra)
    extra[:, :longest] = (gathered(counts, last) - 1).clamp(min=0)
    fresh[:, :longest] = gathered(scores, last)
    bank.keys[:, :longest], bank.values[:, :longest] = gathered(keys, last), gathered(values, last)
    slots = gathered(slots, last)
    bank.slots[:, longest:] = -1
    bank.slots[:, :longest] = slots
    bank.extra, bank.scores = extra, fresh
    bank.used, bank.gaps = longest, longest - shortest
