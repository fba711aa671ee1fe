"""The layer whose entries a selector chooses: packed banks of lanes, each within its own hard budget.

A *lane* is one KV head of one row of the batch: lane = row * kv_heads + head. Lanes choose for themselves, so they hold
different slots, in any order, and may have different budgets. Those with as many columns lie in one *bank*, a packed
tensor (lanes, columns, dim): a head or a row that holds less takes less memory, nothing is masked away.

Nothing is moved when an entry leaves: the new one is written over it. A single new entry takes the place of the
lowest-ranked one before it is attended, so a decoding step attends over the budget's entries, itself included. The
entries of a chunk are attended first, and then compete with the resident ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend, received, weighed
from kvkeep.stores.banks import SAVED, Bank, Gone, move
from kvkeep.stores.checkpoints import expanded
from kvkeep.stores.meter import nbytes
from kvkeep.stores.parts import Candidates, Listener, Parts
from kvkeep.stores.streamed import Step, StreamedLayer, fresh
from kvkeep.stores.whereabouts import Whereabouts

BLOCK = 128
"""Columns by which a bank grows until it has its budget."""

LOWEST = (
    -3e38
)  # ranks below every entry's; those of empty columns rise from it by _STEP, so that the first is filled first
_STEP = 1e33


class SelectedLayer(StreamedLayer):
    """Holds the entries that its selector ranks highest, up to its budgets.

    ``tail``: columns behind those, for entries that are not settled.
    """

    def __init__(self, parts: Parts, tail: int = 0) -> None:
        super().__init__()
        self.index, self.budgets = parts.index, tuple(parts.budgets)
        self.selector, self.fate = parts.selector, parts.fate
        self.listener = parts.fate if isinstance(parts.fate, Listener) else None
        self.home, self.ledger, self.meter, self.tail = parts.home, parts.ledger, parts.meter, tail
        self.length = 0
        self.heads = 0
        self.banks: list[Bank] = []
        self._new_marks: dict[int, Tensor] = {}  # of the entries in hand, by bank

    # -- what attention reads -----------------------------------------------------------------------

    def resident(self) -> Iterator[tuple[Bank, Tensor, Tensor]]:
        """Yield each bank with its keys and values in use, (lanes, 1, entries, dim), views."""
        for bank in self.banks:
            if bank.used:
                yield bank, bank.keys[:, None, : bank.used], bank.values[:, None, : bank.used]

    def seen(self, slots: Tensor, holes: bool, wide: Tensor | None, rows: Tensor | None = None) -> Tensor | None:
        """Return which queries see the entries at ``slots`` (lanes, n): (lanes, 1, queries or 1, n), or None for all.

        ``wide``: a mask of the caller's own over all slots, (lanes, 1, queries, slots), bool or additive.
        """
        mask = slots[:, None, None] >= 0 if holes else None
        visible = self.visible if wide is None else wide
        if visible is None:
            return mask
        visible = visible if rows is None else visible[rows]
        index = slots.clamp(min=0)[:, None, None].long().expand(-1, -1, visible.shape[2], -1)
        picked = visible.gather(3, index)
        if mask is None:
            return picked
        return picked & mask if picked.dtype == torch.bool else picked.masked_fill(~mask, float("-inf"))

    def attend(self, step: Step) -> Tensor:
        """Attend by lanes over what comes back, what is resident and what is new; tell the selector what each entry
        received."""
        own = self.folded(step)
        query, wide = own.query, own.wide(self.length)
        single = self.alone(step)
        if single:
            self.settle()
        held = self.held_segments(step.module, wide)
        recalled: Iterable[Segment] = (
            Segment(*expanded(step.module, keys, values), self.seen(slots, holes, wide))
            for slots, holes, keys, values in self.fate.recall(self, query)
        )
        if self.listener is not None:
            recalled = list(recalled)
        new = None if single else fresh(query, own.key, own.value, own.mask)
        if single and query.shape[2] == 1 and self._told_at_once(held):
            output, (weights, *heard) = weighed(query, [*held, *recalled], step.scaling, self.selector.most)
            self.learn(self.banks[0], weights, 1)
            if self.listener is not None:
                self.listener.hear(self, heard, 1)
        else:
            output, lse = attend(query, chain(recalled, held, () if new is None else (new,)), step.scaling)
            self.observe(query, lse, step.scaling, held, new)
            if self.listener is not None:
                self._tell(self.listener, query, lse, step.scaling, recalled)
        if step.last:
            self.settle()
            if self.listener is not None:
                self.listener.exchange(self)
        return output.reshape(*step.query.shape[:-1], output.shape[-1])

    @property
    def complete(self) -> bool:
        """Whether what is resident is all there is to attend to."""
        return self.fate.forgets

    def _told_at_once(self, held: Sequence[Segment]) -> bool:
        """Whether a single query's weights are wanted, and all there are can be had at once."""
        wanted = self.selector.watches != 0 and (self.complete or self.listener is not None)
        return wanted and len(self.banks) == len(held) == 1

    def _tell(
        self, listener: Listener, query: Tensor, lse: Tensor, scaling: float, recalled: Iterable[Segment]
    ) -> None:
        """Tell a fate what its entries received."""
        watches, lse = self.selector.watches or None, self.unpadded(lse)
        weights = [received(query, piece, lse, scaling, watches, self.selector.most) for piece in recalled]
        listener.hear(self, weights, min(query.shape[2], watches or query.shape[2]))

    def unpadded(self, lse: Tensor) -> Tensor:
        """Return a log-sum-exp, (lanes, heads, queries), by which what padding attends to does not count."""
        if self.visible is None:
            return lse
        return lse.masked_fill(~self.visible[..., -lse.shape[2] :].squeeze(1), float("inf"))

    def folded(self, step: Step) -> Step:
        """Return a step by lanes: its tensors as :meth:`by_lane` folds them, and a mask for each lane."""
        query, key, value = (self.by_lane(part) for part in (step.query, step.key, step.value))
        mask = step.mask
        mask = mask if mask is None or mask.shape[0] == 1 else mask.repeat_interleave(self.heads, 0)
        return replace(step, query=query, key=key, value=value, mask=mask)

    def by_lane(self, part: Tensor) -> Tensor:
        """Fold (batch, heads, n, ...) to (lanes, heads of the group, n, ...)."""
        return part.reshape(-1, part.shape[1] // self.heads, *part.shape[2:])

    def held_segments(self, module: Any, wide: Tensor | None) -> list[Segment]:
        """Return what is resident, a segment for each bank in use; ``wide``: as in :meth:`seen`."""
        return [
            Segment(
                *expanded(module, keys, values),
                self.seen(bank.slots[:, : bank.used], bank.vacant > 0, wide, bank.lanes),
                rows=bank.lanes,
            )
            for bank, keys, values in self.resident()
        ]

    @property
    def visible(self) -> Tensor | None:
        """Which slots of each lane's row are not padding, (lanes, 1, 1, slots); None where there is none."""
        visible = self.ledger.visible
        return None if visible is None else visible.repeat_interleave(self.heads, 0)[:, None, None]

    # -- a step -------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new entries in hand and return them; attention adds the past itself."""
        self.heads = key_states.shape[1]
        new = super().update(key_states, value_states)
        self._new_marks = {}
        if not self.banks:
            self._found(*new)
        self._reserve(key_states.shape[2])
        return new

    def observe(
        self, query: Tensor, lse: Tensor, scaling: float, held: Sequence[Segment], fresh: Segment | None
    ) -> None:
        """Tell the selector how much attention each entry received.

        query, lse: by lane, as attention took and returned them. held: a segment for each bank. fresh: the new entries'
        segment, None once they are settled.
        """
        watches = self.selector.watches
        if watches == 0 or not max(bank.budget for bank in self.banks):
            return
        queries = query.shape[2] if watches is None else min(watches, query.shape[2])
        segments, lse = iter(held), self.unpadded(lse)
        for number, bank in enumerate(self.banks):
            parts = []
            if bank.used:
                parts.append(received(query, next(segments), lse, scaling, watches, self.selector.most))
            if fresh is None:
                if parts:
                    self.learn(bank, parts[0], queries)
                continue
            own = Segment(bank.of(fresh.key), fresh.value, _of(bank, fresh.mask), fresh.causal, bank.lanes)
            parts.append(received(query, own, lse, scaling, watches, self.selector.most))
            # Layers that share entries are each told of; marks of the new ones wait for the last of them.
            entries = self._joined(bank, self._new_marks.get(number))
            marks = self.selector.observe(entries, torch.cat(parts, 1), queries)
            bank.note(marks[:, : bank.used].clone())  # no view: the new ones' would be kept with it
            self._new_marks[number] = marks[:, bank.used :]

    def learn(self, bank: Bank, weights: Tensor, queries: int) -> None:
        """Tell the selector what a bank's entries received: (its lanes, entries in use), of ``queries`` queries."""
        slots, marks = bank.slots[:, : bank.used], bank.noted()[:, : bank.used]
        bank.note(self.selector.observe(self.candidates(bank, slots, marks, self.length), weights, queries))

    def noted(self, slots: Tensor, marks: Tensor, weights: Tensor, queries: int) -> Tensor:
        """Return the marks of entries that are not in banks, (lanes, n), after a step that gave them ``weights``: for
        fates that hear, as the selector notes what is resident."""
        hand = 0 if self.pending is None else self.pending[0].shape[2]
        entries = self.candidates(None, slots, marks, self.length + hand, queries)
        return self.selector.observe(entries, weights, queries)

    def settle(self) -> None:
        """Let the entries in hand compete with those held, and hand what leaves to its fate."""
        if self.pending is None:
            return
        (keys, values), self.pending = self.pending, None
        count = keys.shape[2]
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        left: list[tuple[Bank, Gone]] = []
        whole = self.ledger.whole(count)
        for number, bank in enumerate(self.banks):
            gone = self._settle(bank, bank.of(keys), bank.of(values), self._new_marks.get(number), whole)
            if gone is not None:
                left.append((bank, gone))
        self._new_marks = {}
        self.length += count
        if left:
            self.hand_over(left)

    def _settle(self, bank: Bank, keys: Tensor, values: Tensor, marks: Tensor | None, whole: bool) -> Gone | None:
        """Write the new entries of one bank; return what left."""
        count = keys.shape[1]
        if not bank.columns:  # a budget of nothing
            if self.fate.forgets:
                return None
            marks = self._entered(bank, keys) if marks is None else marks
            return Gone(keys, values, self._new_slots(bank, count), marks)
        if whole and bank.used + count <= bank.columns:
            self._append(bank, keys, values, marks)
            return None
        if whole and count == 1:
            return self._replace(bank, keys, values, marks)
        return self._compete(bank, keys, values, marks)

    def _append(self, bank: Bank, keys: Tensor, values: Tensor, marks: Tensor | None) -> None:
        """Write new entries where there is room for all of them."""
        span = slice(bank.used, bank.used + keys.shape[1])
        bank.keys[:, span], bank.values[:, span] = keys, values
        bank.slots[:, span] = torch.arange(self.length, self.length + keys.shape[1], device=keys.device)
        bank.used = span.stop
        marks = self._entered(bank, keys) if marks is None else marks
        if marks is not None or bank.marks is not None:
            bank.noted()[:, span] = 0.0 if marks is None else marks

    def _replace(self, bank: Bank, keys: Tensor, values: Tensor, marks: Tensor | None) -> Gone | None:
        """Write a single new entry over the lowest-ranked one: the step of every decoded token."""
        entries = self.candidates(bank, bank.slots, bank.marks, self.length + 1)
        if self.selector.reads:
            entries = replace(entries, keys=bank.keys[:, : bank.columns], values=bank.values[:, : bank.columns])
        rank = self.selector.rank(entries)
        if bank.vacant:
            rank = rank.float().masked_fill(bank.slots < 0, float("-inf"))
            bank.vacant -= 1
        if self.selector.ties:
            rank = torch.where(rank == rank.amin(1, keepdim=True), bank.slots, 2**31 - 1)
        victim = rank.argmin(1, keepdim=True)
        left = None if self.fate.forgets else bank.at(victim, self.listener is not None)
        of_keys, of_values = (victim[..., None].expand(-1, -1, rows.shape[2]) for rows in (keys, values))
        bank.keys.scatter_(1, of_keys, keys)
        bank.values.scatter_(1, of_values, values)
        bank.slots.scatter_(1, victim, self.length)
        marks = self._entered(bank, keys) if marks is None else marks
        if marks is not None:
            bank.noted().scatter_(1, victim, marks)
        elif bank.marks is not None:
            bank.marks.scatter_(1, victim, 0.0)
        return left

    def _compete(self, bank: Bank, keys: Tensor, values: Tensor, marks: Tensor | None) -> Gone | None:
        """Rank what is held and what is new together; as many leave as came."""
        lanes, count, columns = keys.shape[0], keys.shape[1], bank.columns
        slots = self._new_slots(bank, count)
        both = torch.cat([bank.slots, slots], 1)
        fresh = self._entered(bank, keys) if marks is None else marks
        joined = None if fresh is None else torch.cat([bank.noted(), fresh], 1)
        entries = self.candidates(bank, both, joined, self.length + count, count)
        if self.selector.reads:
            entries = replace(
                entries,
                keys=torch.cat([bank.keys[:, :columns], keys], 1),
                values=torch.cat([bank.values[:, :columns], values], 1),
            )
        rank = self.selector.rank(entries).float()
        # Empty columns go before any entry, and padding among the new before empty columns.
        empty = torch.arange(columns, device=keys.device) * _STEP + LOWEST
        rank[:, :columns] = torch.where(bank.slots < 0, empty, rank[:, :columns])
        rank[:, columns:].masked_fill_(slots < 0, float("-inf"))
        # The older leaves where two rank the same, wherever they lie.
        by_slot = both.argsort(1)
        order = rank.gather(1, by_slot).argsort(dim=1, stable=True)[:, :count]
        leaving = by_slot.gather(1, order).sort(1).values
        refused = leaving >= columns
        stays = torch.ones(lanes, columns + count, dtype=torch.bool, device=keys.device).scatter_(1, leaving, False)
        order = (~stays[:, columns:]).int().argsort(dim=1, stable=True)  # the new that stay, in order, first
        lane, number = (~refused).nonzero(as_tuple=True)
        target, source = leaving[lane, number], order[lane, number]
        left = None
        if not self.fate.forgets:
            own = leaving.clamp(max=columns - 1), (leaving - columns).clamp(min=0)
            left = Gone(
                _picked(bank.keys, keys, own, refused),
                _picked(bank.values, values, own, refused),
                both.gather(1, leaving),
                None if self.listener is None else joined.gather(1, leaving),  # type: ignore[union-attr]
            )
        bank.keys[lane, target], bank.values[lane, target] = keys[lane, source], values[lane, source]
        bank.slots[lane, target] = slots[lane, source]
        bank.used = columns
        if fresh is not None:
            bank.noted()[lane, target] = fresh[lane, source]
        bank.vacant = int((bank.slots < 0).sum(1).max())
        return left

    def hand_over(self, left: list[tuple[Bank, Gone]]) -> None:
        """Give the fate what left, all lanes together; lanes that gave less have empty places."""
        bank, gone = left[0]
        if bank.lanes is not None:
            shape = self.lanes, max(own.slots.shape[1] for _, own in left)
            whole = [None if part is None else part.new_zeros(*shape, *part.shape[2:]) for part in gone]
            whole[2] = gone.slots.new_full(shape, -1)
            for bank, own in left:
                for kept, part in zip(whole, own, strict=True):
                    if kept is not None and part is not None:
                        kept[bank.lanes, : part.shape[1]] = part
            gone = Gone(*whole)  # type: ignore[arg-type]
        keys, values, slots, marks = (None if part is None else part.unflatten(0, (-1, self.heads)) for part in gone)
        assert keys is not None and values is not None and slots is not None
        self.fate.take(self.index, keys, values, slots, marks)

    # -- marks --------------------------------------------------------------------------------------

    def candidates(
        self, bank: Bank | None, slots: Tensor, marks: Tensor | None, length: int, new: int = 0
    ) -> Candidates:
        """Return entries of a bank as a selector is told of them, of ``length`` slots in all; None: of all lanes, not
        in banks."""
        first = self.ledger.first
        by_lane: Tensor | int = 0
        if first is not None:
            every = first.repeat_interleave(self.heads, 0)
            by_lane = (every if bank is None else bank.of(every))[:, None]
        columns = max(bank.columns for bank in self.banks) if bank is None else bank.columns
        return Candidates(slots, marks, by_lane, length, new, columns, self.heads, self.index)

    def _new_slots(self, bank: Bank, count: int) -> Tensor:
        """Return the slots of the entries in hand, (lanes, count), -1 for padding."""
        slots = torch.arange(self.length, self.length + count, dtype=torch.int32, device=bank.slots.device)
        slots = slots.expand(bank.slots.shape[0], -1)
        if self.visible is not None:
            slots = slots.masked_fill(~bank.of(self.visible)[:, 0, 0, self.length : self.length + count], -1)
        return slots

    def _entered(self, bank: Bank, keys: Tensor) -> Tensor | None:
        """Return the marks that new entries come with, None where nobody asks for them."""
        if not self.selector.enters:
            return None if self.listener is None else torch.zeros(keys.shape[:2], device=keys.device)
        count = keys.shape[1]
        entries = self.candidates(bank, self._new_slots(bank, count), None, self.length + count, count)
        return self.selector.enter(entries, keys)

    def _joined(self, bank: Bank, fresh: Tensor | None) -> Candidates:
        """Return what is held and what is in hand as one list of candidates, with marks."""
        assert self.pending is not None
        keys = bank.of(self.pending[0].flatten(0, 1))
        slots = self._new_slots(bank, keys.shape[1])
        fresh = self._entered(bank, keys) if fresh is None else fresh
        if fresh is None:
            fresh = torch.zeros(slots.shape, device=slots.device)
        marks = torch.cat([bank.noted()[:, : bank.used], fresh], 1)
        slots = torch.cat([bank.slots[:, : bank.used], slots], 1)
        entries = self.candidates(bank, slots, marks, self.length + keys.shape[1], keys.shape[1])
        if not self.selector.reads:
            return entries
        held = (bank.keys[:, : bank.used], bank.values[:, : bank.used])
        values = bank.of(self.pending[1].flatten(0, 1))
        return replace(entries, keys=torch.cat([held[0], keys], 1), values=torch.cat([held[1], values], 1))

    # -- banks --------------------------------------------------------------------------------------

    def _found(self, keys: Tensor, values: Tensor) -> None:
        """Make one empty bank for each different budget of a head."""
        lanes = keys.shape[0] * self.heads
        budgets = self.budgets * (lanes if len(self.budgets) == 1 else keys.shape[0])
        for budget in sorted(set(budgets)):
            own = [lane for lane in range(lanes) if budgets[lane] == budget]
            self.banks.append(self._bank(own, lanes, budget, 0, (keys, values)))

    def _bank(self, own: list[int], lanes: int, budget: int, columns: int, like: tuple[Tensor, Tensor]) -> Bank:
        device = like[0].device
        # Zeros, because an empty column is multiplied with a weight of zero.
        rows = columns + self.tail if columns else 0
        keys, values = (self.home.allocate((len(own), rows, part.shape[-1]), part.dtype).zero_() for part in like)
        slots = torch.full((len(own), columns), -1, dtype=torch.int32, device=device)
        return Bank(None if len(own) == lanes else torch.tensor(own, device=device), budget, keys, values, slots)

    def _reserve(self, count: int) -> None:
        """Let every lane have the columns that its row's entries need, up to its budget; lanes that need as many lie
        together."""
        if all(bank.columns == bank.budget or bank.used + count <= bank.columns for bank in self.banks):
            return
        count_all, homes, counts = self.lanes, self._homes(), self.ledger.counts
        groups: dict[tuple[int, int], list[int]] = {}
        for lane, (bank, _) in homes.items():
            needed = self.length + count if counts is None else counts[lane // self.heads]
            columns = min(bank.budget, max(bank.used, -(-needed // BLOCK) * BLOCK))
            groups.setdefault((bank.budget, columns), []).append(lane)
        now = {(bank.budget, bank.columns): bank.lanes for bank in self.banks}
        if now.keys() == groups.keys() and all(
            lanes is None or lanes.tolist() == sorted(groups[key]) for key, lanes in now.items()
        ):
            return
        old, self.banks = self.banks, []
        for (budget, columns), own in sorted(groups.items()):
            fresh = self._bank(sorted(own), count_all, budget, columns, (old[0].keys, old[0].values))
            move(homes, sorted(own), fresh)
            self.banks.append(fresh)
        with self.meter.holding(*(tensor for bank in old for tensor in bank.tensors())):
            old.clear()

    @property
    def rows(self) -> int:
        """Rows of the batch held."""
        return self.lanes // max(1, self.heads)

    @property
    def lanes(self) -> int:
        """KV heads of all rows held."""
        return sum(bank.slots.shape[0] for bank in self.banks)

    def _homes(self) -> dict[int, tuple[Bank, int]]:
        """Return for every lane its bank and its place there."""
        return {
            lane: (bank, number)
            for bank in self.banks
            for number, lane in enumerate(range(self.lanes) if bank.lanes is None else bank.lanes.tolist())
        }

    # -- the cache contract -------------------------------------------------------------------------

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on; entries that left before do not come back by it."""
        self.pending = None
        if length >= self.length:
            return
        self.length = length
        for bank in self.banks:
            gone = bank.slots[:, : bank.used] >= length
            bank.slots[:, : bank.used].masked_fill_(gone, -1)
            held = bank.slots[:, : bank.used] >= 0
            filled = held.any(0).nonzero()
            bank.used = int(filled.max()) + 1 if filled.numel() else 0
            bank.vacant = int((~held[:, : bank.used]).sum(1).max()) if bank.used else 0

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""
        if not self.banks:
            return
        chosen = [int(row) * self.heads + head for row in index.tolist() for head in range(self.heads)]
        homes = self._homes()
        old, self.banks = self.banks, []
        for bank in old:
            own = [new for new, lane in enumerate(chosen) if homes[lane][0] is bank]
            if not own:
                continue
            fresh = self._bank(own, len(chosen), bank.budget, bank.columns, (bank.keys, bank.values))
            move({new: homes[chosen[new]] for new in own}, own, fresh)
            self.banks.append(fresh)

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated for resident entries."""
        return sum(nbytes(bank.keys, bank.values, bank.sinks) for bank in self.banks)

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes allocated for slots, marks and counts."""
        return sum(nbytes(*bank.tensors()) for bank in self.banks) - self.resident_bytes

    def state(self) -> dict[str, Tensor]:
        """Return what must be saved, by bank."""
        saved: dict[str, Tensor] = {}
        for number, bank in enumerate(self.banks):
            saved[f"{number}.layout"] = torch.tensor([self.heads, bank.budget, bank.used, bank.vacant])
            for name in SAVED:
                if (tensor := getattr(bank, name)) is not None:
                    saved[f"{number}.{name}"] = tensor
        return saved

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Take what :meth:`state` gave, as a cache of ``length`` slots."""
        self.length, self.banks = length, []
        while f"{len(self.banks)}.layout" in state:
            number = len(self.banks)
            self.heads, budget, used, vacant = state[f"{number}.layout"].tolist()
            parts = {name: state.get(f"{number}.{name}") for name in SAVED}
            self.banks.append(Bank(budget=budget, used=used, vacant=vacant, **parts))  # type: ignore[arg-type]
        self.is_initialized = length > 0

    def whereabouts(self, length: int) -> Tensor:
        """Return what became of every slot: (batch, kv_heads, ``length``) codes, on the CPU."""
        codes = self.fate.whereabouts(self, length).to(torch.int8)
        if not self.banks:
            return codes
        held = self.held().unflatten(0, (-1, self.heads))
        return codes.masked_fill(held[..., :length].cpu(), Whereabouts.RESIDENT)

    def held(self) -> Tensor:
        """Return which slots are resident, (lanes, slots) bool."""
        device = self.banks[0].slots.device if self.banks else None
        flags = torch.zeros(self.lanes, self.length + 1, dtype=torch.bool, device=device)
        for bank in self.banks:
            index = bank.slots.long()
            own = torch.zeros(index.shape[0], self.length + 1, dtype=torch.bool, device=device)
            own.scatter_(1, torch.where(index < 0, self.length, index), True)
            if bank.lanes is None:
                flags = own
            else:
                flags[bank.lanes] = own
        return flags[:, : self.length]


def _of(bank: Bank, mask: Tensor | None) -> Tensor | None:
    return mask if mask is None or mask.shape[0] == 1 else bank.of(mask)


def _picked(held: Tensor, new: Tensor, index: tuple[Tensor, Tensor], refused: Tensor) -> Tensor:
    """Gather rows from what is held, or from what is new where ``refused``."""
    fresh = new.gather(1, index[1][..., None].expand(-1, -1, new.shape[2]))
    own = held.gather(1, index[0][..., None].expand(-1, -1, held.shape[2]))
    return torch.where(refused[..., None], fresh, own)
