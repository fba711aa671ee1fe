"""The layer of chosen entries whose leavers join those that stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvkeep.stores.banks import Bank, Gone
from kvkeep.stores.counted import CountedLayer


@dataclass(frozen=True)
class Leaving:
    """Entries that leave a bank's lanes. keys, values: (lanes, n, dim). slots: (lanes, n), -1 for none. counts:
    float32, for how many tokens each stands, 0 for none. newest: the last slot among those. marks: what the selector
    noted, None where it notes nothing."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    counts: Tensor
    newest: Tensor
    marks: Tensor | None


class Joining(Protocol):
    """A fate that lets what leaves join what stays."""

    def join(self, layer: int, heads: int, bank: Bank, left: Leaving) -> None:
        """Put what ``left`` into resident entries of its lanes. ``bank.others`` and ``bank.newest`` are there, and are
        to be kept up: the latter is the last slot whose value an entry has in it."""


class JoinedLayer(CountedLayer):
    """Its fate is a :class:`Joining`."""

    @property
    def complete(self) -> bool:
        """Whether what is resident is all there is to attend to: what left is in it."""
        return True

    def _settle(self, bank: Bank, keys: Tensor, values: Tensor, marks: Tensor | None, whole: bool) -> None:
        """Write the new entries of one bank, and let what leaves join what is there then."""
        slots = bank.slots.clone()
        noted = None if bank.marks is None else bank.marks.clone()
        gone = super()._settle(bank, keys, values, marks, whole)
        if gone is not None and bank.columns:  # no columns: a row of padding so far
            with self.meter.merging():
                self._join(bank, gone, slots, noted, marks)

    def _join(self, bank: Bank, gone: Gone, slots: Tensor, noted: Tensor | None, marks: Tensor | None) -> None:
        """Let what is ``gone`` join what a bank holds. slots, noted: the bank's before; marks: of what is new."""
        if bank.others is None or bank.newest is None:
            bank.others = torch.zeros(slots.shape, device=slots.device)
            bank.newest = torch.zeros_like(slots)
        count, left = gone.slots.shape[1], gone.slots
        written = bank.slots != slots
        was, place = written.max(1, keepdim=True) if count == 1 else _found(left, slots)
        others = bank.others.gather(1, place).masked_fill(~was, 0.0)
        newest = torch.where(was, torch.maximum(left, bank.newest.gather(1, place)), left)
        if noted is not None:  # of new entries that are refused at once, those they came with
            fresh = torch.zeros(left.shape, device=left.device)
            if marks is not None:
                fresh = marks.gather(1, (left.long() - self.length).clamp(0, count - 1))
            noted = torch.where(was, noted.gather(1, place), fresh)
        bank.others.masked_fill_(written, 0.0)
        bank.newest.masked_fill_(written, 0)
        counts = (1 + others) * (left >= 0)
        fate: Any = self.fate
        fate.join(self.index, self.heads, bank, Leaving(gone.keys, gone.values, left, counts, newest, noted))

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on. An entry that one of them has joined goes, too, with all that joined it:
        what was added up cannot be taken apart. Whereabouts go on to call those merged."""
        if length < self.length:
            for bank in self.banks:
                if bank.newest is not None:
                    bank.slots.masked_fill_(bank.newest >= length, -1)
        super().truncate(length)
        for bank in self.banks:
            if bank.others is not None and bank.newest is not None:
                bank.others.masked_fill_(bank.slots < 0, 0.0)
                bank.newest.masked_fill_(bank.slots < 0, 0)


def _found(wanted: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether ``wanted`` (lanes, n) are among ``slots`` (lanes, columns), and in which columns."""
    ordered, order = slots.sort(1)
    place = torch.searchsorted(ordered, wanted.to(ordered.dtype).contiguous()).clamp(max=slots.shape[1] - 1)
    return (ordered.gather(1, place) == wanted) & (wanted >= 0), order.gather(1, place)
