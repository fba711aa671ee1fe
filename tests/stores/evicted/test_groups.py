"""Groups of 32: the last of them in order, whatever sizes entries come in; and the segments that promise most."""

from __future__ import annotations

import copy
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
from kvkeep.policies.fates.segments import Promising
from kvkeep.step.native import entries as native_entries
from kvkeep.step.native import steps as native_steps
from kvkeep.stores.evicted.groups import GROUP, Codec, Groups, allocated

NOBODY: Any = None  # resident entries: what leaves does not look at them


class Plain(Codec):
    """Keys and values as they are."""

    kept: ClassVar[EntryState] = EntryState.QUANTISED

    def encode(self, keys: Tensor, values: Tensor, slots: Tensor) -> list[Tensor]:
        return [keys, values]

    def read(self, query: Tensor, parts: list[Tensor], slots: Tensor, holes: bool) -> Any:
        keys, values = (part.flatten(1, 2)[:, None] for part in parts)
        yield Piece(keys, values, slots.flatten(1), holes=holes)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    room=st.sampled_from([None, 1, 3, 11]),
    counts=st.lists(st.integers(1, 90), min_size=1, max_size=9),
    cut=st.integers(0, 300),
    back=st.integers(0, 300),
)
def test_groups_are_the_last_entries_in_order(room: int | None, counts: list[int], cut: int, back: int) -> None:
    """What is held is the last groups, and what waits; after a rollback, and where some are resident again, less."""
    groups, total, lanes = Groups(room, Plain()), 0, 3
    for count in counts:
        slots = torch.arange(total, total + count, dtype=torch.int32).expand(lanes, -1)
        rows = slots[..., None].float()
        groups.take(EvictedEntries(rows, -rows, slots), NOBODY)
        total += count
    written = total // GROUP
    first = 0 if room is None else max(0, written - room) * GROUP
    states = [2 * (slot >= first) if slot < written * GROUP else 1 for slot in range(total)]  # what waits is as it was
    states = [{0: EntryState.DROPPED, 1: EntryState.RESIDENT, 2: EntryState.QUANTISED}[state] for state in states]

    def assert_held(store: Groups, expected: list[int], rows: int) -> None:
        assert store.states(rows, total).tolist() == [expected] * rows
        for piece in store.pieces(torch.empty(0), NOBODY, total):
            there = piece.slots >= 0
            assert there.all() or piece.holes
            assert torch.equal(piece.keys[:, 0, :, 0][there].int(), piece.slots[there])
            assert torch.equal(piece.values, -piece.keys)

    assert_held(groups, states, lanes)
    again = Groups(room, Plain())
    again.restore({name: tensor.clone() for name, tensor in groups.state().items()})
    groups.truncate(cut, NOBODY)
    assert_held(groups, [state * (slot < cut) for slot, state in enumerate(states)], lanes)
    again.select(torch.tensor([1, 0, 1, 2]))
    again.forget(torch.full((4, 1), back))
    assert_held(again, [state * (slot != back) for slot, state in enumerate(states)], 4)
    size = sum(part.shape[1] for part in again.parts[:1])
    assert size == allocated(written, room) and (room is None or size <= room)


def test_the_most_promising_segments_are_those_with_the_highest_bound() -> None:
    """The largest of any query on the sum over channels of max(q min, q max), in each lane by itself."""
    generator, lanes, count = torch.Generator().manual_seed(0), 3, 20
    keys, values = (torch.randn(lanes, count * GROUP, 6, generator=generator) for _ in range(2))
    slots = torch.arange(count * GROUP, dtype=torch.int32).expand(lanes, -1)
    store = Groups(None, Promising(4, Meter()))
    store.take(EvictedEntries(keys, values, slots), NOBODY)
    query = torch.randn(lanes, 2, 3, 6, generator=generator)
    (piece,) = store.pieces(query, NOBODY, count * GROUP)
    for lane in range(lanes):
        segments, asked = keys[lane].unflatten(0, (-1, GROUP)), query[lane].flatten(0, 1)
        low, high = segments.amin(1), segments.amax(1)  # (segments, dim)
        bound = torch.maximum(asked[:, None] * low, asked[:, None] * high).sum(2).amax(0)
        chosen = set((piece.slots[lane] // GROUP).tolist())
        assert chosen == set(bound.topk(4).indices.tolist())
        assert torch.equal(piece.keys[lane, 0], keys[lane, piece.slots[lane].long()])
        assert torch.equal(piece.values[lane, 0], values[lane, piece.slots[lane].long()])


@pytest.mark.parametrize("method", ["lowrank:8", "quest", "quantized:4"])
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
        assert cache.layers[0].evicted.kept  # groups are there
        return torch.stack(rows)

    found = steps()
    for module in (native_entries, native_steps):
        monkeypatch.setattr(module, "library", lambda: None)
    assert_near(found, steps(), 0.05)
