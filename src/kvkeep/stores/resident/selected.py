"""Selected entries: those that a selector keeps, in banks, each lane within its hard budget."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvkeep.attention import Segment, received
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import EvictedEntries, Piece
from kvkeep.contracts.part import Site
from kvkeep.contracts.resident import WorkingSet
from kvkeep.contracts.selector import Asking, Selector
from kvkeep.contracts.store import EvictedStore
from kvkeep.memory.extent import Extent, ShapeError
from kvkeep.memory.places import Device
from kvkeep.models.adapter import Adapter
from kvkeep.step.plan import Destination, LayerStep, Span
from kvkeep.stores.resident.banks import Bank, Banks
from kvkeep.stores.resident.division import divide
from kvkeep.stores.resident.eviction import Arriving, Ranking, append, compete, replace_lowest


class Selected(WorkingSet):
    """The entries that ``selector`` ranks highest, up to the budgets of ``site``; evicted ones go into ``store``.

    tail: columns behind these, for drafts. adapter: the model's adapter, for a selector that looks ahead.
    """

    def __init__(
        self,
        site: Site,
        selector: Selector,
        store: EvictedStore,
        tail: int = 0,
        adapter: Adapter | None = None,
    ) -> None:
        self.selector, self.store, self.ledger, self.meter = selector, store, site.ledger, site.meter
        self.adapter = adapter
        self.banks = Banks(site.budgets, Device(site.device), site.ledger, site.meter, tail)
        scored = store.listens or store.merges or store.makes_room
        self.ranking = Ranking(selector, self.banks, site.ledger, site.layer.index, scored, site.pinned)
        self.window = selector.observation_window if selector.observation_window != 0 else int(store.watches)
        self.length = 0
        self._hand = 0  # number of new entries before admission
        self._scores: dict[int, Tensor] = {}  # scores of the new entries, by bank

    # -- what attention reads -----------------------------------------------------------------------

    def pieces(self, ordered: bool = True) -> Iterator[Piece]:
        for bank in self.banks:
            if bank.used and bank.columns:
                yield bank.piece()

    def whole_text(self) -> Piece | None:
        """Return all entries as one piece in the order of the text; None if some are missing or lie in another
        order."""
        bank = self.banks.banks[0] if len(self.banks) == 1 else None
        if bank is None or not self.length or self.banks.seen_by_all != self.length:
            return None
        stop = self.length
        if not bool((bank.slots[:, :stop] == torch.arange(stop, device=bank.slots.device)).all()):
            return None
        return Piece(bank.keys[:, None, :stop], bank.values[:, None, :stop])

    # -- attention that was received ----------------------------------------------------------------

    @property
    def observes(self) -> bool:
        """Whether the selector or the store needs attention, and some bank has a budget."""
        return self.window != 0 and any(bank.budget for bank in self.banks)

    def learn(self, weights: Tensor) -> None:
        self._learn(self.banks.banks[0], weights, 1)

    def observe(
        self,
        step: AttentionInputs,
        lse: Tensor,
        segments: Sequence[Segment],
        new: tuple[Tensor, Tensor] | None,
        first: int,
    ) -> None:
        # Layers that share entries observe one after the other.
        if not self.observes:
            return
        arriving = None if new is None else self._arriving(*new, first)
        window = self.window
        queries = step.queries if window is None else min(window, step.queries)
        remaining, lse, incoming = (
            iter(segments),
            self.ledger.unpadded(lse, self.banks.heads),
            None if new is None else step.arriving(),
        )
        asking = None if arriving is None else _asking(self, step, arriving)
        reduce = self.selector.reduce
        for number, bank in enumerate(self.banks):
            parts = []
            if bank.used:
                parts.append(received(step.query, next(remaining), lse, step.scaling, window, reduce))
            if incoming is None or arriving is None:
                if parts:
                    self._learn(bank, parts[0], queries)
                continue
            mask = incoming.mask if incoming.mask is None or incoming.mask.shape[0] == 1 else bank.of(incoming.mask)
            part = Segment(bank.of(incoming.key), incoming.value, mask, incoming.causal, bank.lanes)
            parts.append(received(step.query, part, lse, step.scaling, window, reduce))
            fresh = self._of(bank, number, arriving)
            entries = self.ranking.joined(bank, fresh, bank.used, self.ranking.arrived(bank, fresh))
            if asking is not None:
                queries_of_bank = Asking(bank.of(asking.queries), bank.of(asking.slots), asking.scaling)
                entries = replace(entries, asking=queries_of_bank)
            scores = self.selector.observe(entries, torch.cat(parts, 1), queries)
            bank.score(scores[:, : bank.used].clone())  # a view would keep the new entries' scores in memory
            self._scores[number] = scores[:, bank.used :]

    def _learn(self, bank: Bank, weights: Tensor, queries: int) -> None:
        slots, scores = bank.slots, bank.scored()
        if bank.used < bank.columns:
            slots, scores = slots[:, : bank.used], scores[:, : bank.used]
        entries = self.ranking.candidates(bank, slots, scores, self.length)
        if self.selector.needs_kv:
            entries = replace(entries, keys=bank.keys[:, : bank.used], values=bank.values[:, : bank.used])
        bank.score(self.selector.observe(entries, weights, queries))

    # -- entries come and go ------------------------------------------------------------------------

    def arrive(self, keys: Tensor, values: Tensor) -> None:
        self._scores, self._hand = {}, keys.shape[1]
        self.banks.reserve(keys, values, self.length)

    def spans(self) -> Sequence[Span] | None:
        used = self.banks.seen_by_all
        return [Span(self.banks.banks[0].keys, self.banks.banks[0].values, 0, used)] if used else None

    def plan(self, count: int = 1) -> LayerStep | None:
        """Return the step of one token, without ranks if it evicts, because a group of layers is ranked at once. With a
        selector that :attr:`~Selector.scores_by_slot`, the ranks are in it."""
        if count > 1:  # what a token evicts depends on the attention of the token before
            return None
        bank, selector = self.banks.banks[0], self.selector
        if selector.scores_by_slot:
            return self._plan_scored()
        columns, used = bank.columns, bank.used
        if not columns or self.banks.seen_by_all != used:
            return None
        if selector.scores_arrivals or selector.needs_kv or not selector.of_any_layer:
            return None
        evicts = used == columns
        if evicts and columns < bank.budget:
            return None
        append = Destination(bank.keys, bank.values, used % columns, bank.slots, bank.scores)
        share = self.store.plan(append, 0, evicts)
        if share is None:
            return None
        evicted, evict, seen = share
        spans = [*evicted, Span(bank.keys, bank.values, 0, used + (not evicts))]
        return LayerStep(append, self.ledger.number(self.length), evict=evict, attend=spans, seen=seen)

    def _plan_scored(self) -> LayerStep | None:
        """Return the step of a selector whose scores of new entries are known before their keys. Lanes may have
        different budgets."""
        slot, parts = self.length, list[LayerStep]()
        if self.window != 0 or self.selector.needs_kv or self.ledger.visible is not None:
            return None
        for bank in self.banks:
            grows = bank.used == bank.columns < bank.budget
            if not bank.columns or bank.gaps or bank.extra is not None or grows:
                return None
        slots = self.ledger.slots(slot, 1, self.banks.banks[0].slots.device).expand(self.banks.lanes, 1)
        entries = self.ranking.candidates(None, slots, None, slot + 1, 1)
        arriving = self.selector.arrive(entries, self.banks.banks[0].keys).float()
        for bank in self.banks:
            evicts = bank.used == bank.columns
            bank.scores = bank.scored().contiguous()  # a selector may return an expanded tensor
            scores, ranks = bank.of(arriving).contiguous(), None
            if evicts:
                ranks = self.ranking.of(bank, slot + 1).contiguous()
                ranks = ranks if ranks.dtype in (torch.float32, torch.int32) else ranks.float()
            oldest = self.selector.may_tie or self.ranking.scored
            for first_lane, lanes, keys, values, *beside in bank.runs(self.store.plans_each_lane):
                append = Destination(keys, values, bank.used % bank.columns, *beside)
                share = self.store.plan(append, first_lane, evicts)
                if share is None:
                    return None
                (evicted, evict, seen), by = share, None if ranks is None else ranks[lanes]
                spans = [*evicted, Span(keys, values, 0, bank.used + (not evicts))]
                fresh = scores[lanes].flatten()
                number = self.ledger.number(slot)
                parts.append(LayerStep(append, number, by, oldest, fresh, evict, spans, seen, first_lane=first_lane))
        first, *others = sorted(parts, key=lambda part: part.first_lane)
        return first._replace(others=others) if others else first

    def commit(self) -> None:
        if any(bank.used == bank.columns for bank in self.banks):
            self.store.commit()
        for bank in self.banks:
            bank.used = min(bank.columns, bank.used + 1)
        self.length += 1

    @property
    def group(self) -> Hashable | None:
        bank = self.banks.banks[0]
        shape = bank.slots.shape
        scored = not self.selector.scores_by_slot and (self.window != 0 or bank.used == shape[1])
        return (shape, bank.used, self.length, bank.scores is None) if scored else None

    def _arriving(self, keys: Tensor, values: Tensor, first: int) -> Arriving:
        """Return new entries of all lanes, (lanes, n, dim), whose slots begin at ``first``; padding has none."""

        def slots() -> Tensor:
            """Return the slots of all lanes."""
            numbers = self.ledger.slots(first, keys.shape[1], keys.device)
            if (visible := self.ledger.visible_by(self.banks.heads)) is None:
                return numbers.expand(len(keys), -1)
            return torch.where(visible[:, 0, 0, first : first + keys.shape[1]], numbers, -1)

        return Arriving(keys, values, slots, first, self.ledger.all_tokens(self.ledger.length - first), None)

    def _of(self, bank: Bank, number: int, new: Arriving) -> Arriving:
        keys, values = bank.of(new.keys), bank.of(new.values)
        return Arriving(keys, values, lambda: bank.of(new.slots), new.first, new.unpadded, self._scores.get(number))

    def score_arriving(self, scores: Tensor) -> None:
        """Set the first scores of the new entries, (lanes, n) float32."""
        self._scores = {number: bank.of(scores) for number, bank in enumerate(self.banks)}

    def admit(self, keys: Tensor, values: Tensor, first: int) -> EvictedEntries | None:
        new = self._arriving(keys, values, first)
        overflows = new.count > 1 and any(bank.used + new.count > bank.columns for bank in self.banks)
        if self.selector.divides and overflows:
            left = divide(self, [self._of(bank, number, new) for number, bank in enumerate(self.banks)])
        else:
            parts = [self._admit(bank, self._of(bank, number, new)) for number, bank in enumerate(self.banks)]
            left = self.banks.gathered(parts)
        observed = bool(self._scores)
        self._scores, self._hand = {}, 0
        self.length = first + new.count
        self.store.settled(observed, self)
        return left

    def _admit(self, bank: Bank, new: Arriving) -> EvictedEntries | None:
        """Keep the new entries of one bank; return the evicted ones."""
        store = self.store
        if not bank.columns:  # a budget of 0, or a row of padding
            scores = self.ranking.arrived(bank, new) if store.listens else None
            wanted = store.keeps and not store.merges
            return EvictedEntries(new.keys, new.values, new.slots, scores, gaps=not new.unpadded) if wanted else None
        if new.unpadded and bank.used + new.count <= bank.columns:
            append(bank, new, self.ranking.arrived(bank, new))
            return None
        if store.makes_room:
            store.make_room(bank, new, self)
            return None
        if store.merges:
            bank.counted()
        if new.unpadded and new.count == 1:
            return replace_lowest(bank, new, self.ranking, store.keeps)
        return compete(bank, new, self.ranking, store.keeps)

    # -- what stores and readers ask of it ------------------------------------------------------------

    def observed(self, slots: Tensor, scores: Tensor, weights: Tensor, queries: int) -> Tensor:
        if self.selector.needs_kv:
            return scores
        entries = self.ranking.candidates(None, slots, scores, self.length + self._hand, queries)
        return self.selector.observe(entries, weights, queries)

    def ranks(self, slots: Tensor, scores: Tensor) -> Tensor:
        ranks = self.ranking.rank(self.ranking.candidates(None, slots, scores, self.length)).float()
        return ranks.masked_fill(slots < 0, float("-inf"))

    def lowest(self, count: int) -> Tensor:
        ranks = torch.full((self.banks.lanes, count), float("inf"), device=self.banks.banks[0].slots.device)
        for bank in self.banks:
            of_bank = self.ranking.with_gaps(bank, self.length)
            of_bank = of_bank.topk(min(count, bank.columns), dim=1, largest=False).values
            ranks[bank.index, : of_bank.shape[1]] = of_bank
        return ranks

    def swap_in(self, slots: Tensor, keys: Tensor, values: Tensor, scores: Tensor | None = None) -> None:
        left = []
        for bank in self.banks:
            chosen = bank.of(slots)[:, : max(0, bank.columns - self.ranking.pinned)]
            columns = self.ranking.order(bank, self.length)[:, : chosen.shape[1]]
            if self.store.keeps:
                gone = bank.entries(self.ranking.scored).at(columns)
                left.append(gone._replace(slots=gone.slots.masked_fill(chosen < 0, -1)))
            lane, number = (chosen >= 0).nonzero(as_tuple=True)
            column = columns[lane, number]
            own_keys, own_values = bank.of(keys), bank.of(values)
            bank.keys[lane, column], bank.values[lane, column] = own_keys[lane, number], own_values[lane, number]
            bank.slots[lane, column] = chosen[lane, number].int()
            arrived = None if scores is None else bank.of(scores)
            if arrived is None and self.selector.scores_arrivals:
                entries = self.ranking.candidates(bank, chosen, None, self.length, chosen.shape[1])
                arrived = self.selector.arrive(entries, own_keys)
            if bank.scores is not None:
                bank.scores = bank.scores.contiguous()  # a selector may return an expanded tensor
            if arrived is not None:
                bank.scored()[lane, column] = arrived[lane, number].float()
            elif bank.scores is not None:
                bank.scores[lane, column] = 0.0
            if len(column):
                bank.used = max(bank.used, int(column.max()) + 1)
            bank.count_gaps()
        if left and (gathered := self.banks.gathered(left)) is not None:
            self.store.take(gathered, self)

    def resident_slots(self, unmerged: bool = False) -> Tensor:
        return self.banks.resident_slots(self.length, unmerged)

    # -- the cache contract -------------------------------------------------------------------------

    def truncate(self, length: int) -> None:
        self._scores, self._hand = {}, 0
        self.length = min(self.length, length)
        self.banks.truncate(length)  # a step that was not committed may have left entries

    def select(self, lanes: Tensor) -> None:
        self.banks.select(lanes)

    @property
    def nbytes(self) -> int:
        return self.banks.nbytes

    @property
    def bookkeeping_bytes(self) -> int:
        return self.banks.bookkeeping_bytes

    def state(self) -> dict[str, Tensor]:
        return self.banks.state()

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        self.length = length
        self.banks.restore(state)

    def check(self, extent: Extent) -> None:
        self.banks.check(extent, max(self.selector.sinks_in_cache(True) or 0, self.ranking.pinned))
        if self.selector.scores_arrivals and any(bank.used and bank.scores is None for bank in self.banks):
            raise ShapeError("'scores' are missing")


def _asking(resident: Selected, step: AttentionInputs, new: Arriving) -> Asking | None:
    """Return the queries of a step with ``new`` entries, as the selector looks ahead; None where it does not."""
    if resident.adapter is None:
        return None
    slots = new.slots[:, new.count - step.queries :]
    distance = torch.arange(step.queries, 0, -1, device=slots.device)  # from each query to the next position
    turned = resident.adapter.ahead(resident.ranking.layer, step.query, distance, resident.selector.ahead)
    return Asking(turned, slots, step.scaling)
