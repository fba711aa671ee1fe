"""Groups of 32: the last of them in order, whatever sizes entries come in."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any, ClassVar

import pytest
import torch
from families import tiny
from helpers import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep import KeepCache
from kvkeep.contracts.entries import EntryState, EvictedEntries, Piece
from kvkeep.memory.meter import Meter
from kvkeep.policies.fates.quantize import Quantised
from kvkeep.step import native
from kvkeep.step import torch as plain
from kvkeep.step.native import entries as native_entries
from kvkeep.step.native import steps as native_steps
from kvkeep.step.plan import Destination, LayerStep, Segment
from kvkeep.stores.evicted.groups import GROUP, Codec, NewestGroups, allocated

NOBODY: Any = None  # resident entries: what leaves does not look at them


class Plain(Codec):
    """Keys and values as they are."""

    kept: ClassVar[EntryState] = EntryState.QUANTISED

    def encode(self, keys: Tensor, values: Tensor, slots: Tensor) -> list[Tensor]:
        return [keys, values]

    def read(self, query: Tensor, parts: list[Tensor], slots: Tensor, gaps: bool) -> Any:
        keys, values = (part.flatten(1, 2)[:, None] for part in parts)
        yield Piece(keys, values, slots.flatten(1), gaps=gaps)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    room=st.sampled_from([None, 1, 3, 11]),
    counts=st.lists(st.integers(1, 90), min_size=1, max_size=9),
    cut=st.integers(0, 300),
)
def test_groups_are_the_last_entries_in_order(room: int | None, counts: list[int], cut: int) -> None:
    """What is held is the last groups, and what waits; after a rollback, less."""
    groups, total, lanes = NewestGroups(room, Plain()), 0, 3
    for count in counts:
        slots = torch.arange(total, total + count, dtype=torch.int32).expand(lanes, -1)
        rows = slots[..., None].float()
        groups.take(EvictedEntries(rows, -rows, slots), NOBODY)
        total += count
    written = total // GROUP
    first = 0 if room is None else max(0, written - room) * GROUP
    states = [2 * (slot >= first) if slot < written * GROUP else 1 for slot in range(total)]  # what waits is as it was
    states = [{0: EntryState.DROPPED, 1: EntryState.RESIDENT, 2: EntryState.QUANTISED}[state] for state in states]

    def assert_held(store: NewestGroups, expected: list[int], rows: int) -> None:
        assert store.states(rows, total).tolist() == [expected] * rows
        for piece in store.pieces(torch.empty(0), NOBODY, total):
            there = piece.slots >= 0
            assert there.all() or piece.gaps
            assert torch.equal(piece.keys[:, 0, :, 0][there].int(), piece.slots[there])
            assert torch.equal(piece.values, -piece.keys)

    assert_held(groups, states, lanes)
    again = NewestGroups(room, Plain())
    again.restore({name: tensor.clone() for name, tensor in groups.state().items()})
    assert (again.count, again.waiting_gaps, again.written, again.gaps) == (groups.count, False, written, False)
    groups.truncate(cut, NOBODY)
    assert_held(groups, [state * (slot < cut) for slot, state in enumerate(states)], lanes)
    again.select(torch.tensor([1, 0, 1, 2]))
    assert_held(again, states, 4)
    size = sum(part.shape[1] for part in again.parts[:1])
    assert size == allocated(written, room) and (room is None or size <= room)


@pytest.mark.parametrize("method", ["lowrank:8", "quantized:4"])
def test_steps_with_kernels_are_those_without(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that attention makes of groups for a moment, or chooses by the query, are nothing to point at."""
    model = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
    ids = torch.arange(240)[None] % model.config.vocab_size

    def steps() -> Tensor:
        cache, rows = KeepCache(model, method, 100), []
        with torch.no_grad():
            model(ids[:, :-4], cache=cache)
            for at in range(236, 240):
                rows.append(model(ids[:, at : at + 1], cache=cache).logits[0, -1].float())
        assert (cache.layers[0].entry_states(240, 1) == EntryState.QUANTISED).any()
        return torch.stack(rows)

    found = steps()
    for module in (native_entries, native_steps):
        monkeypatch.setattr(module, "library", lambda: None)
    assert_near(found, steps(), 0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 99), first=st.lists(st.integers(0, 70), min_size=2, max_size=2), room=st.integers(1, 3))
def test_lanes_of_planned_steps_may_evict_different_numbers(seed: int, first: list[int], room: int) -> None:
    """Codes, waiting entries and slots are those of entries that are taken with empty places; a step reads them all."""
    random = torch.Generator().manual_seed(seed)
    one, other = (NewestGroups(room, Quantised(4, Meter())) for _ in range(2))
    planned = 0

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, 16, generator=random).bfloat16()

    def left(counts: list[int], slots: Tensor) -> EvictedEntries:
        there = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        keys, values = (numbers(*there.shape) * there[..., None] for _ in "kv")
        return EvictedEntries(keys, values, torch.where(there, slots.int(), -1), gaps=bool((~there).any()))

    if max(first):
        entries = left(first, torch.arange(max(first)))
        for store in (one, other):
            store.take(entries, NOBODY)
    for slot in range(max(first), max(first) + 90):
        evicts = [bool(torch.rand(1, generator=random) < share) for share in (0.9, 0.3)]
        if not any(evicts):
            continue
        fresh = left([int(evict) for evict in evicts], torch.tensor([slot]))
        here = torch.full((1, 1), slot, dtype=torch.int32)
        rows = [Destination(fresh.keys[lane][None], fresh.values[lane][None], 0, here.clone()) for lane in range(2)]
        shares = [one.plan(row, lane, evicts[lane]) for lane, row in enumerate(rows)]
        other.take(fresh, NOBODY)
        if any(found is None for found in shares):
            one.take(fresh, NOBODY)
            continue
        planned += 1
        steps = []
        for lane, (row, share) in enumerate(zip(rows, shares, strict=True)):
            assert share is not None and (share.evict is not None) == evicts[lane]
            steps.append(LayerStep(row, slot, evict=share.evict, attend=share.attend, seen=share.seen, first_lane=lane))
            native.insert(steps[-1], numbers(1), numbers(1))
        one.commit()
        for lane, step in enumerate(steps):
            assert_read_alike(step, other, lane)
    assert planned > 50
    for mine, theirs in zip([*one.parts, one.slots], [*other.parts, other.slots], strict=True):
        assert mine is not None and theirs is not None and torch.equal(mine[:, : one.kept], theirs[:, : other.kept])
    assert one.count == other.count
    for mine, theirs in zip(one.waiting, other.waiting, strict=True):
        assert torch.equal(mine[:, : one.count], theirs[:, : one.count])


def assert_read_alike(step: LayerStep, store: NewestGroups, lane: int) -> None:
    """A planned step reads the entries that a store yields for its lane."""
    query, row = torch.linspace(-2, 2, 16).bfloat16().expand(1, 1, 1, 16), step.append
    resident = Segment(row.keys[:, None], row.values[:, None])
    segments = [*(segment for segment in step.segments() if segment.key.shape[-2]), resident]
    pieces = [resident]
    for piece in store.pieces(query, NOBODY, 0):
        pair = [
            part[lane : lane + 1] if isinstance(part, Tensor) else of_lane(part, lane)
            for part in (piece.keys, piece.values)
        ]
        pieces.append(Segment(*pair, (piece.slots[lane] >= 0)[None, None, None]))
    for mine, theirs in zip(plain.combined(query, segments, 0.3), plain.combined(query, pieces, 0.3), strict=True):
        assert_near(mine, theirs, 5e-3)


def of_lane(part: Any, lane: int) -> Any:
    """The codes of one lane."""
    own = {field.name: getattr(part, field.name) for field in fields(part)}
    return replace(part, **{name: one[lane : lane + 1] for name, one in own.items() if isinstance(one, Tensor)})
