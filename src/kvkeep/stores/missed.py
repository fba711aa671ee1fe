"""The layer that recalls after a step what it may have missed, for the next one (llama.cpp pull request 21097)."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from kvkeep.stores.bounds import PAGE
from kvkeep.stores.exchange import bring, compact, fetched
from kvkeep.stores.selective import Choice, SelectiveLayer


class Misses(Choice, Protocol):
    """What counts as missed, and how much of it comes back; :mod:`kvkeep.policies.recalls.missed` has it."""

    @property
    def limit(self) -> int:
        """Entries of a lane that come back after a step, at most."""

    @property
    def threshold(self) -> float:
        """The share of attention that is use; 0 stands for 1/T, T tokens so far."""


class MissedLayer(SelectiveLayer):
    """A :class:`SelectiveLayer` whose steps of few queries attend to what is resident alone. Afterwards entries of
    pages that by their bounds may have been used take the places of those that rank lowest: the highest bound first,
    half a lane's budget at most, so that what was in use is not all driven out."""

    choice: Misses

    def exchange(self, query: Tensor, lse: Tensor, scaling: float) -> None:
        """Bring back what was missed."""
        away = self.away()
        if away is None:
            return
        by_page = away.unflatten(1, (-1, PAGE))
        most = self.bounds.upper(query).mul_(scaling).sub_(self._counted(lse)[..., None]).amax((1, 2))
        first = self.ledger.first
        tokens: Tensor | int = self.length
        if first is not None:
            tokens = (self.length - first).clamp(min=1).repeat_interleave(self.heads, 0)[:, None]
        used = math.log(self.choice.threshold) if self.choice.threshold else -torch.as_tensor(tokens).log()
        missed = by_page & (most >= used)[..., None]
        order = (
            most.masked_fill(~missed.any(2), float("-inf")).topk(min(self.choice.limit, most.shape[1]), dim=1).indices
        )
        slots = (order[..., None] * PAGE + torch.arange(PAGE, device=order.device)).flatten(1)
        wanted = missed.flatten(1).gather(1, slots)
        wanted &= wanted.cumsum(1) <= self._limits(slots.device)
        chosen = compact(wanted)
        if chosen.shape[1]:
            slots = slots.gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, -1)
            bring(self, slots, *fetched(self, slots))

    def _limits(self, device: torch.device) -> Tensor:
        """Return how many entries may come back, (lanes, 1)."""
        limits = torch.empty(self.lanes, 1, dtype=torch.int64, device=device)
        for bank in self.banks:
            limits[slice(None) if bank.lanes is None else bank.lanes] = min(self.choice.limit, bank.columns // 2)
        return limits
