"""A group of layers whose selectors rank and score their entries at once, as if they were one layer of more lanes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.contracts.selector import Candidates
from kvkeep.step.plan import LayerStep
from kvkeep.stores.resident.selected import Selected


class LayerGroup:
    """The slots and scores of several layers in one tensor each. The banks of the layers become views of these.

    residents: the resident entries of the layers, with the same :attr:`~kvkeep.contracts.resident.Resident.group`. They
    have one selector, which ranks the entries of every layer by the same rule.
    """

    def __init__(self, residents: Sequence[Selected]) -> None:
        self.residents, self.banks = residents, [one.banks.banks[0] for one in residents]
        self.selector = residents[0].selector
        self.slots = torch.cat([bank.slots for bank in self.banks])  # (layers * lanes, columns)
        scored = residents[0].window != 0 or self.banks[0].scores is not None
        self.scores = torch.cat([bank.scored() for bank in self.banks]) if scored else None
        self._lanes = len(self.banks[0].slots)
        slots = self.slots.split(self._lanes)
        scores = [None] * len(slots) if self.scores is None else self.scores.split(self._lanes)
        self._views = list(zip(slots, scores, strict=True))
        for bank, (own_slots, own_scores) in zip(self.banks, self._views, strict=True):
            bank.move_beside(own_slots, own_scores)
        self._received: Tensor | None = None

    def holds(self, residents: Sequence[Selected]) -> bool:
        """Return whether ``residents`` are those of this group, and their banks still are views of its tensors."""
        return len(residents) == len(self.residents) and all(
            one is other
            and len(one.banks) == 1
            and (bank := one.banks.banks[0]).slots is slots
            and bank.scores is scores
            for one, other, (slots, scores) in zip(residents, self.residents, self._views, strict=True)
        )

    def plan(self, steps: Sequence[LayerStep]) -> list[LayerStep]:
        """Return each layer's step with the ranks that choose the evicted entry, and with the attention that entries
        receive."""
        bank, one = self.banks[0], self.residents[0]
        ranks: Sequence[Tensor | None] = [None] * len(steps)
        if bank.used == bank.columns:
            rank = one.ranking.rank(self._candidates(bank.columns, one.length + 1)).contiguous()
            rank = rank if rank.dtype in (torch.float32, torch.int32) else rank.float()
            ranks = rank.split(self._lanes)
        received: Sequence[Tensor | None] = [None] * len(steps)
        self._received = None
        if one.window != 0:
            self._received = torch.empty(len(self.slots), steps[0].entries, device=self.slots.device)
            received = self._received.split(self._lanes)
        oldest = self.selector.may_tie or one.ranking.scored
        reduce = "" if self._received is None else self.selector.reduce
        return [
            LayerStep(
                one.append if one.append.slots is slots else one.append._replace(slots=slots, scores=scores),
                one.slot,
                by,
                oldest,
                None,
                one.evict,
                one.attend,
                one.seen,
                reduce,
                weights,
            )
            for one, (slots, scores), by, weights in zip(steps, self._views, ranks, received, strict=True)
        ]

    def finish(self, completed: bool) -> None:
        """Score the entries by the attention that they received. completed: the steps have run in all layers; otherwise
        nothing is scored."""
        received, self._received = self._received, None
        if completed and received is not None and self.scores is not None:
            used = self.banks[0].used
            entries = self._candidates(used, self.residents[0].length)
            self.scores[:, :used] = self.selector.observe(entries, received[:, -used:], 1)

    def _candidates(self, used: int, length: int) -> Candidates:
        one = self.residents[0]
        scores = None if self.scores is None else self.scores[:, :used]
        return one.ranking.candidates(self.banks[0], self.slots[:, :used], scores, length)
