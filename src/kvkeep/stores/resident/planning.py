"""Plans the step of a decoded token among selected entries."""

from __future__ import annotations

from typing import Any

import torch

from kvkeep.step.plan import Destination, LayerStep, Span


def plan(resident: Any) -> LayerStep | None:
    """Return the step of the next entry of each lane of ``resident``, a
    :class:`~kvkeep.stores.resident.selected.Selected`; None where it cannot be planned. A step that evicts has no ranks
    yet, unless the selector's first scores follow from slots: a group of layers is ranked at once."""
    bank, selector = resident.banks.banks[0], resident.selector
    if selector.scores_by_slot:
        return _plan_scored(resident)
    columns, used = bank.columns, bank.used
    if not columns or resident.banks.seen_by_all != used:
        return None
    if selector.scores_arrivals or selector.needs_kv or not selector.of_any_layer:
        return None
    evicts = used == columns
    if evicts and columns < bank.budget:
        return None
    append = Destination(bank.keys, bank.values, used % columns, bank.slots, bank.scores)
    share = resident.store.plan(append, 0, evicts)
    if share is None:
        return None
    evicted, evict, seen = share
    spans = [*evicted, Span(bank.keys, bank.values, 0, used + (not evicts))]
    return LayerStep(append, resident.length, evict=evict, attend=spans, seen=seen)


def _plan_scored(resident: Any) -> LayerStep | None:
    """Return the step of a selector whose scores of new entries are known before their keys. Lanes may have
    different budgets."""
    slot, parts = resident.length, list[LayerStep]()
    if resident.window != 0 or resident.selector.needs_kv or resident.ledger.visible is not None:
        return None
    for bank in resident.banks:
        grows = bank.used == bank.columns < bank.budget
        if not bank.columns or bank.gaps or bank.extra is not None or grows:
            return None
    slots = torch.full((resident.banks.lanes, 1), slot, dtype=torch.int32, device=resident.banks.banks[0].slots.device)
    entries = resident.ranking.candidates(None, slots, None, slot + 1, 1)
    arriving = resident.selector.arrive(entries, resident.banks.banks[0].keys).float()
    for bank in resident.banks:
        evicts = bank.used == bank.columns
        bank.scores = bank.scored().contiguous()  # a selector may return an expanded tensor
        scores, ranks = bank.of(arriving).contiguous(), None
        if evicts:
            ranks = resident.ranking.of(bank, slot + 1).contiguous()
            ranks = ranks if ranks.dtype in (torch.float32, torch.int32) else ranks.float()
        oldest = resident.selector.may_tie or resident.ranking.scored
        for first_lane, lanes, keys, values in bank.runs:
            append = Destination(keys, values, bank.used % bank.columns, bank.slots[lanes], bank.scores[lanes])
            share = resident.store.plan(append, first_lane, evicts)
            if share is None:
                return None
            (evicted, evict, seen), by = share, None if ranks is None else ranks[lanes]
            spans = [*evicted, Span(keys, values, 0, bank.used + (not evicts))]
            fresh = scores[lanes].flatten()
            parts.append(LayerStep(append, slot, by, oldest, fresh, evict, spans, seen, first_lane=first_lane))
    first, *others = sorted(parts, key=lambda part: part.first_lane)
    return first._replace(others=others) if others else first
