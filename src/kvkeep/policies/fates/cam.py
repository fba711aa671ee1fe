"""``cam``: the values of what leaves go into the next entries that stay, with chance (CaM, Zhang et al., ICML 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvkeep.errors import UsageError
from kvkeep.policies.fates.base import Fate
from kvkeep.policies.fates.dropped import Forgetting
from kvkeep.policies.request import Exactness, LiveFate, Request
from kvkeep.policies.selectors.base import Selector
from kvkeep.policies.selectors.random import drawn
from kvkeep.stores.banks import Bank
from kvkeep.stores.joined import JoinedLayer, Leaving
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter
from kvkeep.stores.selected import SelectedLayer


@dataclass(frozen=True)
class Cam(Fate):
    """An entry's value is spread evenly over the ``into`` next entries that stay, with probability clamp(A / mean of
    their A, 0, 1), A being what the selector has noted of attention; keys are left as they are. The chance is drawn
    from ``seed``, layer, head and slot alone."""

    into: int = 32
    seed: int = 0

    label: ClassVar[str] = "values merged by chance"
    recall: ClassVar[str] = "never"
    exactness: ClassVar[Exactness] = Exactness.LOSSY
    layers: ClassVar[type[SelectedLayer]] = JoinedLayer

    def __post_init__(self) -> None:
        if self.into < 1:
            raise UsageError(f"A value goes into one entry at least, not {self.into}.")

    def check(self, name: str, selector: Selector) -> None:
        """Raise UsageError for selectors that do not hear attention: there is no A."""
        if selector.watches == 0:
            raise UsageError(f"'{name}' has no attention to merge by; use 'cam' with one that hears it, as h2o+cam.")

    def build(self, request: Request, ledger: Ledger, meter: Meter) -> LiveFate:
        """Return the one that draws."""
        return _Drawing(self, meter)


class _Drawing(Forgetting):
    forgets = False

    def __init__(self, how: Cam, meter: Meter) -> None:
        self.how, self.meter = how, meter

    def join(self, layer: int, heads: int, bank: Bank, left: Leaving) -> None:
        assert bank.newest is not None and bank.marks is not None and left.marks is not None
        slots, order = bank.slots[:, : bank.used].sort(1)
        first = torch.searchsorted(slots, left.slots.contiguous(), right=True)[..., None]
        into = first + torch.arange(self.how.into, device=first.device)
        there = (into < bank.used) & (left.slots[..., None] >= 0)
        columns = order.gather(1, into.clamp(max=bank.used - 1).flatten(1))
        weights = bank.marks.gather(1, columns).view_as(there) * there
        heard = there.sum(2).clamp(min=1)
        chance = left.marks / (weights.sum(2) / heard)
        goes = drawn(left.slots, heads, layer, self.how.seed) < chance.nan_to_num(0.0)
        there = there & goes[..., None]
        share = (there / heard[..., None]).to(left.values.dtype)
        parts = (left.values[:, :, None] * share[..., None]).flatten(1, 2)
        with self.meter.holding(parts):
            bank.values.scatter_add_(1, columns[..., None].expand_as(parts), parts)
        newest = torch.where(there, left.newest[..., None], 0).flatten(1).to(bank.newest.dtype)
        bank.newest.scatter_reduce_(1, columns, newest, "amax")
