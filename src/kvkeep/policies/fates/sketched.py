"""``sketch``: what leaves is added to a count sketch, and attention sees what it is estimated to be (KVReviver)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.attention.attend import FOLDED
from kvkeep.errors import BudgetError, UsageError, unknown
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.fates.base import Fate
from kvkeep.policies.request import Exactness, LiveFate, Request
from kvkeep.stores.exchange import bring, compact, lowest
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter, nbytes
from kvkeep.stores.selected import SelectedLayer
from kvkeep.stores.sketch import MEDIAN, PAGE, CountSketch, Estimates, places
from kvkeep.stores.whereabouts import Whereabouts

SWAPS = 8
"""Entries of a lane that are compared at a time."""

_CHOICES = {"estimate": ("plain", "centred", "shrunk"), "by": ("median", "mean"), "keys": ("unsigned", "signed")}


@dataclass(frozen=True)
class Sketched(Fate):
    """A share ``vague`` of the budget is a count sketch for each KV head, the rest exact entries. Values have signs,
    keys only where ``keys`` is "signed". ``estimate``: "plain", "centred" or "shrunk", ``by`` the "median" or "mean" of
    ``rows`` slots (:mod:`kvkeep.stores.sketch`). ``swap``: an entry comes back, as it is estimated, when it ranks above
    that many times the lowest resident one; 0: none does."""

    vague: float = 0.1
    swap: float = 0.0
    estimate: str = "plain"
    by: str = "median"
    keys: str = "unsigned"
    rows: int = 3

    label: ClassVar[str] = "sketched"
    recall: ClassVar[str] = "approximately, from a count sketch"
    exactness: ClassVar[Exactness] = Exactness.REVERSIBLE
    records: ClassVar[bool] = True  # positions are what is hashed

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                raise unknown(f"sketch: {name}", given, choices)
        if not 0 < self.vague <= 0.5:
            raise UsageError(f"The sketch has a share of the budget above 0 and up to 0.5, not {self.vague:g}.")
        if self.swap and not self.swap >= 1:
            raise UsageError(
                f"Entries are swapped at 1 times the lowest rank or more, or never (0), not {self.swap:g}."
            )
        if self.rows not in MEDIAN:
            raise UsageError(f"A sketch has {', '.join(map(str, MEDIAN))} rows, not {self.rows}.")

    def resident(self, geometry: ModelGeometry, entries: int) -> int:
        """Return the exact ones."""
        return entries - self._own(entries)

    def _own(self, entries: int) -> int:
        """Return how many entries' room is the sketch's: whole rows of slots, two at least."""
        return max(2 * self.rows, int(self.vague * entries) // self.rows * self.rows)

    def build(self, request: Request, ledger: Ledger, meter: Meter) -> LiveFate:
        """Return empty sketches. Raises BudgetError where they would have more than half the budget."""
        entries, _ = request.bounded(self.label)
        own = self._own(entries)
        if 2 * own > entries:
            raise BudgetError(
                f"A budget of {entries} entries has no room for a sketch of {self.rows} rows beside the exact ones; "
                f"give it at least {4 * self.rows}."
            )
        slots = {}
        for layer in request.geometry.full_layers:
            # Tallies are float32: a vector in all, and for each cell a count of its keys and one of its values.
            width = layer.key_dim + layer.value_dim
            entry, count, total = width * request.geometry.dtype_bytes, 8, 4 * width
            tallied = (own * entry - total) // (self.rows * (entry + count))
            slots[layer.index] = own // self.rows if self.estimate == "plain" else max(1, tallied)
        return (_Reviving if self.swap else _Sketch)(self, slots, ledger, meter)


class _Sketch:
    """The sketches of all layers at work. A lane's entries are in its sketch or not, by slot; hashed are positions."""

    forgets = False

    def __init__(self, fate: Sketched, slots: dict[int, int], ledger: Ledger, meter: Meter) -> None:
        self.how, self.slots, self.ledger, self.meter = fate, slots, ledger, meter
        self.sketches: dict[int, tuple[CountSketch, CountSketch]] = {}  # of keys, of values
        self.heads: dict[int, int] = {}
        self.inside: dict[int, Tensor] = {}  # (lanes, slots and one more for none) bool
        self._hashed: dict[int, Tensor] = {}  # by slots of a row: places (rows, batch, slots of the sequence)

    def take(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, marks: Tensor | None) -> None:
        """Add what leaves to the sketch."""
        heads = keys.shape[1]
        keys, values, slots = keys.flatten(0, 1), values.flatten(0, 1), slots.flatten(0, 1)
        if layer not in self.sketches:
            self._found(layer, heads, [keys, values])
        at, there = self._places(layer, slots), slots >= 0
        for sketch, vectors in zip(self.sketches[layer], (keys, values), strict=True):
            sketch.insert(at, vectors, there)
        self.inside[layer] = _put(self.inside.get(layer), slots, True)

    def recall(self, layer: SelectedLayer, query: Tensor) -> Iterator[tuple[Tensor, bool, Any, Any]]:
        """Yield estimates of all entries in the sketch, unwritten."""
        if (inside := self.inside.get(layer.index)) is None:
            return
        slots = compact(inside[:, :-1])
        keys, values = self._estimates(layer.index, slots)
        size = max(1, slots.shape[1]) if query.shape[2] <= FOLDED else PAGE
        holes = bool((slots < 0).any())
        with self.meter.holding(keys.index, values.index, keys.cells, values.cells):
            for start in range(0, slots.shape[1], size):
                stop = start + size
                yield slots[:, start:stop], holes, keys.part(start, stop), values.part(start, stop)

    def whereabouts(self, layer: SelectedLayer, length: int) -> Tensor:
        """Return the codes of what left."""
        codes = torch.full((layer.rows * layer.heads, length), Whereabouts.DROPPED)
        if (inside := self.inside.get(layer.index)) is not None:
            own = inside[:, :-1][:, :length].cpu()
            codes[:, : own.shape[1]].masked_fill_(own, Whereabouts.SKETCHED)
        return codes.unflatten(0, (layer.rows, -1))

    def truncate(self, length: int) -> None:
        """Delete what the forgotten entries are estimated to be; by how much that is wrong stays as noise."""
        for layer, inside in self.inside.items():
            if inside[:, length:-1].any():
                slots = compact(inside[:, length:-1])
                self._delete(layer, torch.where(slots < 0, slots, slots + length))
        self._hashed = {}

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""
        self._hashed = {}
        for layer, heads in self.heads.items():
            lanes = index.to(self.inside[layer].device)[:, None] * heads
            lanes = (lanes + torch.arange(heads, device=lanes.device)).flatten()
            for sketch in self.sketches[layer]:
                sketch.select(lanes)
            for table in self._tables():
                table[layer] = table[layer].index_select(0, lanes)

    def state(self) -> dict[str, Tensor]:
        """Return what must be saved."""
        saved: dict[str, Tensor] = {}
        for layer, heads in self.heads.items():
            parts = [part for sketch in self.sketches[layer] for part in sketch.state()]
            parts = [*(table[layer] for table in self._tables()), *parts]
            saved[f"fate.{layer}.heads"] = torch.tensor(heads)
            saved |= {f"fate.{layer}.{number}": part for number, part in enumerate(parts)}
        return saved

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` gave."""
        for layer in self.slots:
            if (heads := state.get(f"fate.{layer}.heads")) is None:
                continue
            parts = [
                state[f"fate.{layer}.{number}"] for number in range(len(state)) if f"fate.{layer}.{number}" in state
            ]
            for table in self._tables():
                table[layer] = parts.pop(0)
            half = len(parts) // 2
            self._found(layer, int(heads), [parts[0], parts[half]])
            for sketch, own in zip(self.sketches[layer], (parts[:half], parts[half:]), strict=True):
                sketch.restore(own)

    @property
    def compressed_bytes(self) -> int:
        """Bytes of all cells and tallies."""
        return sum(sketch.nbytes for pair in self.sketches.values() for sketch in pair)

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes of flags and marks, and of the places of every slot."""
        return nbytes(*self._hashed.values(), *(one for table in self._tables() for one in table.values()))

    def _tables(self) -> list[dict[int, Tensor]]:
        """Return what is held by slot, of each layer (lanes, slots and one more for none)."""
        return [self.inside]

    def _found(self, layer: int, heads: int, like: Sequence[Tensor]) -> None:
        self.heads[layer] = heads
        tallies = self.how.estimate != "plain"
        signed = self.how.keys == "signed", True
        self.sketches[layer] = tuple(  # type: ignore[assignment]
            CountSketch(one.shape[0], self.how.rows, self.slots[layer], one.shape[2], sign, tallies, like=one)
            for one, sign in zip(like, signed, strict=True)
        )

    def _estimates(self, layer: int, slots: Tensor) -> tuple[Estimates, Estimates]:
        """Return what the entries at ``slots`` (lanes, n) are estimated to be."""
        at = self._places(layer, slots)
        held = None if self.how.estimate == "plain" else self.inside[layer].sum(1)
        shrink = self.how.estimate == "shrunk"
        keys, values = (sketch.estimates(at, self.how.by, held, shrink, self.meter) for sketch in self.sketches[layer])
        return keys, values

    def _delete(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Take the entries at ``slots`` (lanes, n) out of the sketch and return what they were estimated to be."""
        at, there, found = self._places(layer, slots), slots >= 0, []
        for sketch, estimates in zip(self.sketches[layer], self._estimates(layer, slots), strict=True):
            found.append(estimates.dense(sketch.cells.dtype))
            sketch.delete(at, found[-1], there)
        self.inside[layer] = _put(self.inside[layer], slots, False)
        return found[0], found[1]

    def _places(self, layer: int, slots: Tensor) -> Tensor:
        """Return where the entries at ``slots`` (lanes, n) are, (rows, lanes, n) int32; anywhere for -1."""
        size, length = self.slots[layer], self.ledger.length
        known = self._hashed.get(size)
        if known is None or known.shape[2] != length:
            positions = self.ledger.positions.view().squeeze(-1)
            known = self._hashed[size] = places(positions, self.how.rows, size).int()
        row = torch.arange(slots.shape[0], device=slots.device)[:, None] // self.heads[layer] * length
        return known.flatten(1).index_select(1, (slots.clamp(min=0) + row).flatten()).view(self.how.rows, *slots.shape)


class _Reviving(_Sketch):
    """Entries in the sketch go on adding up attention, and come back for those that rank too low: while the lowest
    resident rank times ``swap`` is below the highest in the sketch (KVReviver, Algorithm 3). What comes back is an
    estimate, and so is what is deleted."""

    def __init__(self, fate: Sketched, slots: dict[int, int], ledger: Ledger, meter: Meter) -> None:
        super().__init__(fate, slots, ledger, meter)
        self.marks: dict[int, Tensor] = {}  # (lanes, slots and one more for none) float32
        self._asked: dict[int, list[Tensor]] = {}  # slots of the pieces that were last yielded

    def take(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, marks: Tensor | None) -> None:
        """Add what leaves to the sketch, with its marks."""
        super().take(layer, keys, values, slots, marks)
        assert marks is not None
        self.marks[layer] = _put(self.marks.get(layer), slots.flatten(0, 1), marks.flatten(0, 1))

    def recall(self, layer: SelectedLayer, query: Tensor) -> Iterator[tuple[Tensor, bool, Any, Any]]:
        """Yield estimates, and note of which entries."""
        self._asked[layer.index] = asked = []
        for piece in super().recall(layer, query):
            asked.append(piece[0])
            yield piece

    def hear(self, layer: SelectedLayer, weights: Sequence[Tensor], queries: int) -> None:
        """Let the selector note what the entries received."""
        if not weights:
            return
        slots, marks = torch.cat(self._asked.pop(layer.index), 1), self.marks[layer.index]
        own = layer.candidates(None, slots, _got(marks, slots), layer.length)
        self.marks[layer.index] = _put(marks, slots, layer.selector.observe(own, torch.cat(list(weights), 1), queries))

    def exchange(self, layer: SelectedLayer) -> None:
        """Let entries come back."""
        if (inside := self.inside.get(layer.index)) is None:
            return
        columns = max(bank.columns for bank in layer.banks)
        count = min(SWAPS, columns, inside.shape[1] - 1)
        for _ in range(0, columns, count):
            inside, marks = self.inside[layer.index][:, :-1], self.marks[layer.index][:, :-1]
            slots = torch.arange(inside.shape[1], dtype=torch.int32, device=inside.device)
            slots = slots.masked_fill(~inside, -1)
            ranks = layer.selector.rank(layer.candidates(None, slots, marks, layer.length)).float()
            ranks = ranks.masked_fill(~inside, float("-inf"))
            if layer.selector.ties:  # of those that rank the same, the older comes back first
                ranks, best = (one[:, :count] for one in ranks.sort(dim=1, descending=True, stable=True))
            else:
                ranks, best = ranks.topk(count, dim=1)
            chosen = (lowest(layer, count) * self.how.swap < ranks) & (ranks > float("-inf"))
            if not chosen.any():
                return
            slots = best.masked_fill(~chosen, -1)
            bring(layer, slots, *self._delete(layer.index, slots), _got(self.marks[layer.index], slots))
            if not chosen.all(1).any():
                return

    def _tables(self) -> list[dict[int, Tensor]]:
        return [self.inside, self.marks]


def _put(table: Tensor | None, slots: Tensor, what: Tensor | bool) -> Tensor:
    """Write ``what`` at ``slots`` (lanes, n), -1 for none, of a table (lanes, slots and one more for none), which grows
    as it needs to; None: a new one, of zeros."""
    needed = int(slots.max()) + 2 if slots.numel() else 1
    if table is None or table.shape[1] < needed:
        size = max(256, needed + needed // 2)
        dtype = torch.bool if isinstance(what, bool) else what.dtype
        grown = torch.zeros(slots.shape[0], size, dtype=dtype, device=slots.device)
        if table is not None:
            grown[:, : table.shape[1] - 1] = table[:, :-1]
        table = grown
    index = torch.where(slots < 0, table.shape[1] - 1, slots).long()
    table.scatter_(1, index, what)
    table[:, -1] = 0
    return table


def _got(table: Tensor, slots: Tensor) -> Tensor:
    """Return what a table has at ``slots`` (lanes, n), the zero of its last column for none."""
    return table.gather(1, torch.where(slots < 0, table.shape[1] - 1, slots).long())
