"""Banks: packed tensors of the lanes that have as many columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SAVED = ("keys", "values", "slots", "marks", "others", "newest", "sinks", "lanes")
MOVED = ("keys", "values", "slots", "marks", "others", "newest")


class Gone(NamedTuple):
    """Entries that left their bank: keys, values (lanes, n, dim), slots (lanes, n), -1 for none, and marks (lanes, n)
    float32 where the fate hears."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    marks: Tensor | None


@dataclass
class Bank:
    """Lanes whose entries lie in one tensor.

    lanes: which, None for all of them. used: columns that may hold something; vacant: the most columns among them that
    are empty in any lane. sinks: the first keys as they came, where positions are within the cache. Where entries stand
    for several tokens: others, how many besides their own (float32, 0 in empty columns), and newest, the last slot in
    them where that is not their own.
    """

    lanes: Tensor | None
    budget: int
    keys: Tensor
    values: Tensor
    slots: Tensor
    marks: Tensor | None = None
    others: Tensor | None = None
    newest: Tensor | None = None
    sinks: Tensor | None = None
    used: int = 0
    vacant: int = 0

    def of(self, rows: Tensor) -> Tensor:
        """Return this bank's share of something that all lanes have."""
        return rows if self.lanes is None else rows[self.lanes]

    @property
    def columns(self) -> int:
        """Entries each lane has room for."""
        return self.slots.shape[1]

    def tensors(self) -> list[Tensor]:
        """Return what is allocated."""
        return [tensor for name in SAVED if (tensor := getattr(self, name)) is not None]

    def noted(self) -> Tensor:
        """Return the marks, zeros where there were none yet."""
        if self.marks is None:
            self.marks = torch.zeros(self.slots.shape, device=self.slots.device)
        return self.marks

    def at(self, columns: Tensor, marked: bool) -> Gone:
        """Return copies of what lies in ``columns`` (lanes, n); ``marked``: with marks."""
        index = columns[..., None]
        keys, values = (rows.gather(1, index.expand(-1, -1, rows.shape[2])) for rows in (self.keys, self.values))
        return Gone(keys, values, self.slots.gather(1, columns), self.noted().gather(1, columns) if marked else None)

    def note(self, marks: Tensor) -> None:
        """Replace the marks of the columns in use."""
        if self.used == self.columns:
            self.marks = marks
        else:
            self.noted()[:, : self.used] = marks


def move(homes: dict[int, tuple[Bank, int]], own: list[int], fresh: Bank) -> None:
    """Copy lanes ``own`` from where they were into ``fresh``."""
    sources: dict[int, tuple[Bank, list[int], list[int]]] = {}
    for number, lane in enumerate(own):
        bank, place = homes[lane]
        _, places, numbers = sources.setdefault(id(bank), (bank, [], []))
        places.append(place)
        numbers.append(number)
    fresh.used = min(fresh.columns, max(bank.used for bank, _, _ in sources.values()))
    for bank, places, numbers in sources.values():
        used = min(fresh.columns, bank.used)
        for name in MOVED:
            rows = getattr(bank, name)
            if rows is None:
                continue
            if getattr(fresh, name) is None:
                setattr(fresh, name, rows.new_zeros(len(own), fresh.columns))
            getattr(fresh, name)[numbers, :used] = rows[places, :used]
        if bank.sinks is not None:
            fresh.sinks = bank.sinks.new_zeros(len(own), *bank.sinks.shape[1:]) if fresh.sinks is None else fresh.sinks
            fresh.sinks[numbers] = bank.sinks[places]
        fresh.vacant = max(fresh.vacant, fresh.used - used + bank.vacant)
