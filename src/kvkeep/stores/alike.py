"""Banks of several layers that are alike, as one of more rows: a selector ranks and scores their entries at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.attention.together import Arrival
from kvkeep.contracts.selector import Candidates
from kvkeep.native.library import address
from kvkeep.stores.selected import Selected


class Alike:
    """The slots and scores of ``residents``, which each have one bank of as many columns, in use as far, of as many
    slots: in one tensor each, of which the banks have views from then on. All have one selector, which does not tell
    layers apart."""

    def __init__(self, residents: Sequence[Selected]) -> None:
        self.residents, self.banks = residents, [one.banks.banks[0] for one in residents]
        self.selector = residents[0].selector
        self.slots = torch.cat([bank.slots for bank in self.banks])  # (layers · lanes, columns)
        scored = residents[0].window != 0 or self.banks[0].scores is not None
        self.scores = torch.cat([bank.scored() for bank in self.banks]) if scored else None
        lanes = len(self.banks[0].slots)
        for number, bank in enumerate(self.banks):
            own = slice(number * lanes, (number + 1) * lanes)
            bank.slots, bank.scores = self.slots[own], None if self.scores is None else self.scores[own]
        self._views = [(bank.slots, bank.scores) for bank in self.banks]
        self._ranks: Tensor | None = None
        self._received: Tensor | None = None

    def holds(self, residents: Sequence[Selected]) -> bool:
        """Return whether these are the same, and their banks have the views that they were given."""
        return len(residents) == len(self.residents) and all(
            one is other
            and len(one.banks) == 1
            and (bank := one.banks.banks[0]).slots is slots
            and bank.scores is scores
            for one, other, (slots, scores) in zip(residents, self.residents, self._views, strict=True)
        )

    def prepare(self, arrivals: Sequence[Arrival]) -> None:
        """Tell the kernel the ranks by which an entry leaves, and where to write what entries received: of each
        resident's arrival."""
        bank, one = self.banks[0], self.residents[0]
        lanes, width = len(bank.slots), arrivals[0].entries
        self._ranks = self._received = None
        if bank.used == bank.columns:
            rank = self.selector.rank(self._candidates(bank.columns, one.length + 1)).contiguous()
            assert rank.dtype in (torch.float32, torch.int32)
            self._ranks = rank
        if one.window != 0:
            self._received = torch.empty(len(self.slots), width)
        size, room = lanes * bank.columns * 4, lanes * width * 4  # bytes of a layer's slots, scores or ranks
        slots, scores, ranks, received = map(address, (self.slots, self.scores, self._ranks, self._received))
        whole = self._ranks is not None and self._ranks.dtype == torch.int32
        oldest, greatest = self.selector.may_tie or one.ranking.scored, self.selector.reduce == "max"
        for number, arrival in enumerate(arrivals):
            insert, first = arrival.insert, number * size
            assert slots is not None
            insert.slots, insert.scores = slots + first, None if scores is None else scores + first
            if ranks is not None:
                insert.at, insert.ranks, insert.whole, insert.oldest = 0, ranks + first, whole, oldest
            arrival.report(None if received is None else received + number * room, greatest)

    def learn(self) -> None:
        """Score the entries by what they received, when the kernel has kept and attended one more of each."""
        received, self._ranks, self._received = self._received, None, None
        if received is not None and self.scores is not None:
            entries = self._candidates(used := self.banks[0].used, self.residents[0].length)
            self.scores[:, :used] = self.selector.observe(entries, received, 1)

    def _candidates(self, used: int, length: int) -> Candidates:
        one = self.residents[0]
        scores = None if self.scores is None else self.scores[:, :used]
        columns, heads = self.banks[0].columns, one.banks.heads
        return Candidates(self.slots[:, :used], scores, 0, length, 0, columns, heads, one.ranking.layer)
