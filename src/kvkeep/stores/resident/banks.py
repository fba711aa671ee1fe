"""Banks: each holds the lanes of one capacity, packed in one tensor.

A lane is one KV head of one row of the batch. Each lane keeps its choice of entries, so lanes hold different slots, in
any order, and may have different budgets. Lanes with the same number of columns form one *bank*, a packed tensor
(lanes, columns, dim). A head or a row with fewer entries therefore takes less memory, instead of masked columns. An
eviction moves no other entry: the new entry overwrites the evicted one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.contracts.entries import EvictedEntries, Piece, gathered
from kvkeep.memory.extent import Extent, ShapeError, fits, within
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter, nbytes
from kvkeep.memory.places import Place
from kvkeep.memory.rows import up

COLUMNS = 128
"""The number of columns by which a bank grows, up to its budget."""

SAVED = ("keys", "values", "slots", "scores", "extra", "newest", "sinks", "lanes")
MOVED = ("keys", "values", "slots", "scores", "extra", "newest")


class Run(NamedTuple):
    """Lanes of a bank that lie one after the other in a row, and views of its tensors."""

    first_lane: int
    lanes: slice
    """The lanes within the bank."""
    keys: Tensor
    values: Tensor
    slots: Tensor
    scores: Tensor | None


@dataclass
class Bank:
    """Lanes whose entries lie in one tensor."""

    lanes: Tensor | None
    """The indices of the lanes; None: all."""
    budget: int
    """The maximum number of entries of a lane."""
    keys: Tensor
    """(lanes, columns + tail, key_dim)"""
    values: Tensor
    """(lanes, columns + tail, value_dim)"""
    slots: Tensor
    """(lanes, columns) int32, -1 for an empty column."""
    scores: Tensor | None = None
    """(lanes, columns) float32, the selector's score of each entry."""
    extra: Tensor | None = None
    """(lanes, columns) float32, the number of further tokens that an entry stands for, 0 in empty columns; None before
    the first merging."""
    newest: Tensor | None = None
    """(lanes, columns), the last slot merged into an entry; None before the first merging."""
    sinks: Tensor | None = None
    """The first keys before rotation, where positions are within the cache."""
    used: int = 0
    """The number of columns in use: those that may hold an entry."""
    gaps: int = 0
    """The number of empty columns in use: the largest of any lane."""
    _runs: list[Run] = field(default_factory=list)
    _run_of: tuple[Any, ...] = (None,) * 5

    def of(self, rows: Tensor) -> Tensor:
        """Return the part of ``rows``, a tensor by lane, for this bank's lanes."""
        return rows if self.lanes is None else rows[self.lanes]

    @property
    def index(self) -> Any:
        return slice(None) if self.lanes is None else self.lanes

    @property
    def columns(self) -> int:
        return self.slots.shape[1]

    def tensors(self) -> list[Tensor]:
        return [tensor for name in SAVED if (tensor := getattr(self, name)) is not None]

    def scored(self) -> Tensor:
        """Return the scores, zeros where there were none yet."""
        if self.scores is None:
            self.scores = torch.zeros(self.slots.shape, device=self.slots.device)
        return self.scores

    def score(self, scores: Tensor) -> None:
        """Replace the scores of the columns in use."""
        if self.used == self.columns and scores.device.type == "cpu":
            self.scores = scores
        else:  # in place: a graph of CUDA finds them there
            self.scored()[:, : self.used] = scores

    def move_beside(self, slots: Tensor, scores: Tensor | None) -> None:
        """Keep slots and scores in these tensors from now on: parts of the tensors of a group of layers, which has
        copied them there."""
        self.slots, self.scores = slots, scores

    def counted(self) -> tuple[Tensor, Tensor]:
        """Return :attr:`extra` and :attr:`newest`, zeros where nothing was merged yet."""
        if self.extra is None or self.newest is None:
            self.extra = torch.zeros(self.slots.shape, device=self.slots.device)
            self.newest = torch.zeros_like(self.slots)
        return self.extra, self.newest

    def piece(self, tail: int = 0) -> Piece:
        """Return the columns in use, and the first ``tail`` columns of the tail behind them."""
        stop, gaps = self.used + tail, self.gaps > 0
        extra = None if self.extra is None else self.extra[:, : self.used]
        keys, values = self.keys[:, None, :stop], self.values[:, None, :stop]
        return Piece(keys, values, self.slots[:, : self.used], gaps=gaps, extra=extra, lanes=self.lanes)

    def runs(self, by_lane: bool) -> list[Run]:
        """Return lanes that lie one after the other in a row: a single run if this bank has all lanes, else, or
        ``by_lane``, one for each. Its tensors are the same objects as long as this bank's are, because what is compiled
        for the native library is found by them."""
        now = self.keys, self.values, self.slots, self.scores, by_lane
        if not all(map(is_, now, self._run_of)):
            self._runs, self._run_of = self._made_runs(by_lane, *now[:-1]), now
        return self._runs

    def _made_runs(self, by_lane: bool, *tensors: Tensor | None) -> list[Run]:
        if self.lanes is None and not by_lane:
            return [Run(0, slice(None), *tensors)]  # type: ignore[arg-type]
        lanes = range(len(self.slots)) if self.lanes is None else self.lanes.tolist()
        places = [slice(number, number + 1) for number in range(len(lanes))]
        return [
            Run(lane, rows, *(None if one is None else one[rows] for one in tensors))  # type: ignore[arg-type]
            for lane, rows in zip(lanes, places, strict=True)
        ]

    def counts(self) -> Tensor:
        """Return the number of tokens that each column in use stands for, (lanes, used) float32, 0 for an empty one."""
        there = (self.slots[:, : self.used] >= 0).float()
        return there if self.extra is None else there * (1 + self.extra[:, : self.used])

    def entries(self, scored: bool) -> EvictedEntries:
        """Return all columns, without a copy. scored: with scores."""
        scores = self.scored() if scored else None
        return EvictedEntries(self.keys, self.values, self.slots, scores, self.extra, self.newest)

    def check(self, extent: Extent, tail: int, sinks: int | None) -> None:
        lanes = extent.lanes if self.lanes is None else len(self.lanes)
        extent.numbered("slots", self.slots, (lanes, None))
        within("columns", self.columns, 0, self.budget + 1)
        if extent.entries(self.keys, self.values, lanes) != self.columns + (tail if self.columns else 0):
            raise ShapeError("'slots' are not those of the keys")
        for name, dtype in (("scores", torch.float32), ("extra", torch.float32), ("newest", torch.int32)):
            if getattr(self, name) is not None:
                fits(name, getattr(self, name), (lanes, self.columns), dtype)
        if self.newest is not None:
            within("newest", self.newest, -1, extent.slots)
        if self.sinks is not None:
            fits("sinks", self.sinks, (lanes, sinks or 0, extent.key_dim), self.keys.dtype)
        within("used columns", self.used, 0, self.columns + 1)
        occupied = self.slots >= 0
        twice = self.slots.sort(1).values.diff(dim=1).eq(0).sum() > (~occupied).sum(1).sub(1).clamp(min=0).sum()
        gaps = int((~occupied[:, : self.used]).sum(1).max()) if self.used and lanes else 0
        if twice or bool(occupied[:, self.used :].any()) or not gaps <= self.gaps <= self.used:
            raise ShapeError("'slots' are twice the same, or where none are used")

    def recount(self) -> None:
        """Count the columns in use, and the empty ones among them."""
        if not self.slots.numel():
            self.used = self.gaps = 0
            return
        occupied = self.slots >= 0
        numbers = torch.arange(1, self.columns + 1, device=occupied.device)
        found = torch.stack([(occupied * numbers).max(), occupied.sum(1).min()])
        self.used, least = found.tolist()  # on a GPU, the host waits once
        self.gaps = self.used - least

    def count_gaps(self) -> None:
        """Count the empty columns among those in use: the largest number of any lane."""
        self.gaps = int((self.slots[:, : self.used] < 0).sum(1).max()) if self.used else 0


class Banks:
    """The banks of one layer. budgets: entries of each lane, or of each KV head where all rows agree; one number: the
    same for all. tail: columns behind these, for drafts."""

    def __init__(self, budgets: Sequence[int], home: Place, ledger: Ledger, meter: Meter, tail: int = 0) -> None:
        self.budgets, self.home, self.ledger, self.meter, self.tail = tuple(budgets), home, ledger, meter, tail
        self.heads = 0  # KV heads of a row
        self.banks: list[Bank] = []

    def __iter__(self) -> Iterator[Bank]:
        return iter(self.banks)

    def __len__(self) -> int:
        return len(self.banks)

    @property
    def lanes(self) -> int:
        """KV heads of all rows held."""
        return sum(bank.slots.shape[0] for bank in self.banks)

    @property
    def columns(self) -> int:
        return max(bank.columns for bank in self.banks)

    @property
    def least_columns(self) -> int:
        """The smallest capacity of a lane, in entries."""
        return min((bank.columns for bank in self.banks), default=0)

    @property
    def seen_by_all(self) -> int:
        """The number of columns in use, if they are consecutive and every later query sees all of them; else 0."""
        bank = self.banks[0]
        if len(self.banks) > 1 or bank.gaps or bank.extra is not None or self.ledger.visible is not None:
            return 0
        return bank.used

    def reserve(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Give every lane the columns for its row's entries, with the new ``keys`` and ``values`` (lanes, n, dim) after
        ``length`` slots, up to its budget. Lanes with the same number of columns share a bank."""
        if not self.banks:
            self._found(keys, values)
        count = keys.shape[1]
        if all(bank.columns == bank.budget or bank.used + count <= bank.columns for bank in self.banks):
            return
        homes, counts = self._homes(), self.ledger.counts
        groups: dict[tuple[int, int], list[int]] = {}
        for lane, (bank, _) in homes.items():
            needed = length + count if counts is None else counts[lane // self.heads]
            columns = min(bank.budget, max(bank.used, up(needed, COLUMNS)))
            groups.setdefault((bank.budget, columns), []).append(lane)
        now = {(bank.budget, bank.columns): bank.lanes for bank in self.banks}
        if now.keys() == groups.keys() and all(
            lanes is None or lanes.tolist() == sorted(groups[key]) for key, lanes in now.items()
        ):
            return
        lanes, old, self.banks = self.lanes, self.banks, []
        for (budget, columns), members in sorted(groups.items()):
            fresh = self._bank(sorted(members), lanes, budget, columns, (old[0].keys, old[0].values))
            _move(homes, sorted(members), fresh)
            self.banks.append(fresh)
        with self.meter.holding(*(tensor for bank in old for tensor in bank.tensors())):
            old.clear()

    def _found(self, keys: Tensor, values: Tensor) -> None:
        """Make one empty bank for each different budget of a head."""
        lanes = keys.shape[0]
        self.heads = lanes // self.ledger.batch
        budgets = self.budgets * (lanes // len(self.budgets))
        for budget in sorted(set(budgets)):
            members = [lane for lane in range(lanes) if budgets[lane] == budget]
            self.banks.append(self._bank(members, lanes, budget, 0, (keys, values)))

    def _bank(self, members: list[int], lanes: int, budget: int, columns: int, like: tuple[Tensor, Tensor]) -> Bank:
        device = like[0].device
        # Zeros, because an empty column is multiplied with a weight of zero.
        rows = columns + self.tail if columns else 0
        keys, values = (self.home.allocate((len(members), rows, part.shape[-1]), part.dtype).zero_() for part in like)
        slots = torch.full((len(members), columns), -1, dtype=torch.int32, device=device)
        return Bank(
            None if len(members) == lanes else torch.tensor(members, device=device), budget, keys, values, slots
        )

    def _homes(self) -> dict[int, tuple[Bank, int]]:
        """Return for every lane its bank and its place there."""
        return {
            lane: (bank, number)
            for bank in self.banks
            for number, lane in enumerate(range(self.lanes) if bank.lanes is None else bank.lanes.tolist())
        }

    def gathered(self, parts: Sequence[EvictedEntries | None]) -> EvictedEntries | None:
        """Join the evicted entries of each bank (None: none) for all lanes; lanes with fewer entries have empty
        places."""
        there = [(bank, left) for bank, left in zip(self.banks, parts, strict=True) if left is not None]
        if not there or there[0][0].lanes is None:
            return there[0][1] if there else None
        shape = self.lanes, max(left.slots.shape[1] for _, left in there)
        like = there[0][1][:-1]
        joined = [None if part is None else part.new_zeros(*shape, *part.shape[2:]) for part in like]
        joined[2] = there[0][1].slots.new_full(shape, -1)
        for bank, left in there:
            for kept, part in zip(joined, left[:-1], strict=True):
                if kept is not None and part is not None:
                    kept[bank.lanes, : part.shape[1]] = part
        full = len(there) == len(self.banks) and all(left.slots.shape[1] == shape[1] for _, left in there)
        gathered = EvictedEntries(*joined)  # type: ignore[arg-type]
        return gathered._replace(gaps=not full or any(left.gaps for _, left in there))

    @outside_inference_mode
    def refill(self, entries: EvictedEntries, ranks: Tensor, budgets: Sequence[int]) -> Tensor:
        """Give each lane another budget, and fill it with those of ``entries``, (lanes, n, dim), that have the highest
        ``ranks``, (lanes, n) float32, -inf where there is no entry. Of equal ranks, the newer entries stay. Return
        which stay, (lanes, n) bool."""
        self.banks, self.budgets = [], tuple(budgets)
        counts = (entries.slots >= 0).sum(1).tolist()
        lanes, groups = len(counts), defaultdict(list)
        for lane, (count, budget) in enumerate(zip(counts, self.budgets * (lanes // len(budgets)), strict=True)):
            groups[budget, bank_columns(budget, count)].append(lane)
        order = entries.slots.argsort(1)
        order = order.gather(1, ranks.gather(1, order).argsort(dim=1, stable=True))
        stays = torch.zeros(ranks.shape, dtype=torch.bool, device=ranks.device)
        for (budget, columns), members in sorted(groups.items()):
            bank = self._bank(members, lanes, budget, columns, (entries.keys, entries.values))
            chosen = order[bank.index, max(0, order.shape[1] - columns) :].sort(1).values
            stays[bank.index] = stays[bank.index].scatter(1, chosen, True)
            for name in MOVED:
                if (rows := getattr(entries, name)) is None:
                    continue
                if getattr(bank, name) is None:
                    setattr(bank, name, rows.new_zeros(bank.slots.shape))
                getattr(bank, name)[:, : chosen.shape[1]] = gathered(bank.of(rows), chosen)
            bank.recount()
            self.banks.append(bank)
        return stays & (entries.slots >= 0)

    def resident_slots(self, length: int, unmerged: bool = False) -> Tensor:
        device = self.banks[0].slots.device if self.banks else None
        flags = torch.zeros(self.lanes, length + 1, dtype=torch.bool, device=device)
        for bank in self.banks:
            index = bank.slots.long()
            for counted in (bank.extra, bank.newest) if unmerged else ():
                if counted is not None:
                    index = index.masked_fill(counted > 0, -1)
            of_bank = torch.zeros(index.shape[0], length + 1, dtype=torch.bool, device=device)
            of_bank.scatter_(1, torch.where(index < 0, length, index), True)
            flags[bank.index] = of_bank
        return flags[:, :length]

    def truncate(self, length: int) -> None:
        """Empty the columns of slots from ``length`` on. An entry that such a slot was merged into is removed with all
        its tokens, because a sum cannot be separated."""
        for bank in self.banks:
            gone = bank.slots >= length
            if bank.newest is not None:
                gone |= bank.newest >= length
            bank.slots.masked_fill_(gone, -1)
            for counted in (bank.extra, bank.newest):
                if counted is not None:
                    counted.masked_fill_(bank.slots < 0, 0)
            bank.recount()

    def select(self, index: Tensor) -> None:
        if not self.banks:
            return
        chosen, homes = index.tolist(), self._homes()
        if len(self.budgets) > self.heads:
            self.budgets = tuple(self.budgets[lane] for lane in chosen)
        old, self.banks = self.banks, []
        for bank in old:
            members = [new for new, lane in enumerate(chosen) if homes[lane][0] is bank]
            if not members:
                continue
            fresh = self._bank(members, len(chosen), bank.budget, bank.columns, (bank.keys, bank.values))
            _move({new: homes[chosen[new]] for new in members}, members, fresh)
            self.banks.append(fresh)

    @property
    def nbytes(self) -> int:
        return sum(nbytes(bank.keys, bank.values, bank.sinks) for bank in self.banks)

    @property
    def bookkeeping_bytes(self) -> int:
        return sum(nbytes(*bank.tensors()) for bank in self.banks) - self.nbytes

    def state(self) -> dict[str, Tensor]:
        saved: dict[str, Tensor] = {}
        for number, bank in enumerate(self.banks):
            saved[f"{number}.layout"] = torch.tensor([self.heads, bank.budget, bank.used, bank.gaps])
            for name in SAVED:
                if (tensor := getattr(bank, name)) is not None:
                    saved[f"{number}.{name}"] = tensor
        return saved

    def restore(self, state: dict[str, Tensor]) -> None:
        self.banks = []
        while f"{len(self.banks)}.layout" in state:
            number = len(self.banks)
            self.heads, budget, used, gaps = state[f"{number}.layout"].tolist()
            parts = {name: state.get(f"{number}.{name}") for name in SAVED}
            self.banks.append(Bank(budget=budget, used=used, gaps=gaps, **parts))  # type: ignore[arg-type]

    def check(self, extent: Extent, sinks: int | None) -> None:
        """Raise ShapeError where banks do not have all lanes of ``extent``, each within its budget. sinks: the number
        of first entries that may have a key before rotation."""
        if not self.banks and not extent.slots:
            return
        found: list[int] = []
        for bank in self.banks:
            if bank.lanes is not None:
                within("lanes", fits("lanes", bank.lanes, (None,), torch.int64), 0, extent.lanes)
            found += range(extent.lanes) if bank.lanes is None else bank.lanes.tolist()
            bank.check(extent, self.tail, sinks)
        budgets = self.budgets * (extent.lanes // len(self.budgets))
        wanted = {lane: budgets[lane] for lane in range(extent.lanes)}
        homes = {lane: bank.budget for lane, (bank, _) in self._homes().items()}
        if sorted(found) != [*range(extent.lanes)] or homes != wanted or self.heads * self.ledger.batch != extent.lanes:
            raise ShapeError("resident entries are not of all KV heads")


def _move(homes: dict[int, tuple[Bank, int]], members: list[int], fresh: Bank) -> None:
    """Copy lanes ``members`` from their present banks into ``fresh``."""
    sources: dict[int, tuple[Bank, list[int], list[int]]] = {}
    for number, lane in enumerate(members):
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
                setattr(fresh, name, rows.new_zeros(len(members), fresh.columns))
            getattr(fresh, name)[numbers, :used] = rows[places, :used]
        if bank.sinks is not None:
            fresh.sinks = (
                bank.sinks.new_zeros(len(members), *bank.sinks.shape[1:]) if fresh.sinks is None else fresh.sinks
            )
            fresh.sinks[numbers] = bank.sinks[places]
        fresh.gaps = max(fresh.gaps, fresh.used - used + bank.gaps)


def bank_columns(budget: int, tokens: int) -> int:
    """Return the columns of a lane with a budget of ``budget`` entries after ``tokens`` tokens."""
    return min(budget, up(tokens, COLUMNS))
