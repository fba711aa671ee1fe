"""Precision tiers: within their bytes at every moment, nothing lost before it has to be, the most attended highest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny
from helpers import assert_near, bounded, expected, prompt, read
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep import KeepCache
from kvkeep.attention import Segment, attend, attend_scored
from kvkeep.contracts.entries import EvictedEntries
from kvkeep.memory.extent import Extent, ShapeError
from kvkeep.memory.meter import Meter
from kvkeep.stores.evicted.groups import GROUP
from kvkeep.stores.evicted.tier_sizes import TIERS, channel_bytes, prices, tier_counts, waiting_bytes
from kvkeep.stores.evicted.tiers import Tiers

DIM, LANES = 16, 3
NOBODY: Any = None  # resident entries: what leaves does not look at them


def entries(start: int, count: int) -> EvictedEntries:
    """Keys and values, slots, and scores in another order in each lane."""
    generator = torch.Generator().manual_seed(start)
    keys, values = (torch.randn(LANES, count, DIM, generator=generator) + 2 for _ in range(2))
    slots = torch.arange(start, start + count, dtype=torch.int32).expand(LANES, -1).clone()
    return EvictedEntries(keys, values, slots, torch.rand(LANES, count, generator=generator))


def new(room: int) -> Tiers:
    return Tiers(room, DIM, DIM, 4, Meter())


def groups_of(tiers: Tiers) -> int:
    return sum(tier.groups for tier in tiers.tiers)


def filled(room: int, counts: list[int]) -> tuple[Tiers, EvictedEntries]:
    tiers, start, every = new(room), 0, []
    for count in counts:
        every.append(entries(start, count))
        tiers.take(every[-1], NOBODY)
        start += count
    return tiers, EvictedEntries(*(torch.cat(parts, 1) for parts in zip(*(one[:4] for one in every), strict=True)))


def pieces(tiers: Tiers) -> list[Any]:
    return list(tiers.pieces(torch.zeros(LANES, 1, 1, DIM), NOBODY, 0))


def held(tiers: Tiers, lane: int) -> Tensor:
    return torch.cat([piece.slots[lane] for piece in pieces(tiers)])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    room=st.integers(1500, 30000),
    counts=st.lists(st.one_of(st.just(1), st.integers(1, 150)), min_size=1, max_size=12),
)
def test_bytes_never_exceed_the_room_and_nothing_is_there_twice(room: int, counts: list[int]) -> None:
    tiers, start, kept = new(room), 0, [0]
    for count in counts:
        if more := (start % GROUP + count) // GROUP:
            kept = tier_counts(room - channel_bytes(DIM), prices(DIM, DIM, 4), groups_of(tiers) + more)
        tiers.take(entries(start, count), NOBODY)
        start += count
        assert tiers.compressed_bytes <= LANES * (room + 2 * DIM * waiting_bytes(4))
        assert groups_of(tiers) == sum(kept)  # what is not where it could be has fallen, but is there
        for lane in range(LANES):
            slots = held(tiers, lane).tolist()
            assert len(slots) == len(set(slots)) == GROUP * sum(kept) + start % GROUP
            assert all(0 <= slot < start for slot in slots)


def test_counts_use_the_room() -> None:
    room, costs = 40000, prices(DIM, DIM, 4)
    for groups in range(1, 400, 7):
        counts = tier_counts(room, costs, groups)
        used = sum(count * cost for count, cost in zip(counts, costs, strict=True))
        assert used <= room
        if counts[0] < groups:  # not everything at 16 bits: less than a step is left
            assert room - used < 6 * costs[0]
        if sum(counts) < groups:  # what is gone is gone for room, not while much has many bits
            assert counts[0] + counts[1] <= sum(counts) / 8
    assert tier_counts(room, costs, 5) == [5, *[0] * (len(TIERS) - 1)]


def test_least_attended_fall_first_in_each_head_by_itself() -> None:
    tiers, (_, _, _, scores, *_) = filled(9000, [GROUP] * 40)
    by_tier = [piece.slots for piece in pieces(tiers)]
    assert len(by_tier) >= 2 and sum(slots.shape[1] for slots in by_tier) < 40 * GROUP
    assert scores is not None
    sums = scores.unflatten(1, (-1, GROUP)).sum(2)
    for lane in range(LANES):
        groups = [slots[lane, ::GROUP].long() // GROUP for slots in by_tier]
        means = [float(sums[lane][own].mean()) for own in groups]
        assert means == sorted(means, reverse=True)
        gone = set(range(40)) - {int(group) for own in groups for group in own}
        worst = max(float(sums[lane][own].min()) for own in groups)
        assert gone and max(float(sums[lane][group]) for group in gone) < worst
    assert not torch.equal(by_tier[0][0], by_tier[0][1])


def test_attention_that_returns_keeps_a_group() -> None:
    tiers, _ = filled(9000, [GROUP] * 30)
    assert not tiers.count
    lowest = [tier for tier in tiers.tiers if tier.groups][-1]  # its last group is the lowest of all
    spared = pieces(tiers)[-1].slots[:, -GROUP:].clone()
    lowest.parts[-1][:, -1] = 1e3
    for number in range(30, 60):
        tiers.take(entries(number * GROUP, GROUP), NOBODY)
    for lane in range(LANES):
        assert torch.isin(spared[lane], held(tiers, lane)).all()


def test_saved_tiers_are_read_as_they_were() -> None:
    """Also by other lanes, and after a rollback; a saved state of another form is refused."""
    tiers, _ = filled(9000, [70, *[1] * 30, 900, 7])
    again = new(9000)
    again.restore({name: tensor.clone() for name, tensor in tiers.state().items()})
    again.check(Extent(LANES, 1007, DIM, DIM))
    assert again.spans() is not None and again.compressed_bytes == tiers.compressed_bytes
    again.select(torch.tensor([2, 0, 1]))
    for store in (tiers, again):
        store.truncate(800, NOBODY)
    for lane, other in enumerate([2, 0, 1]):
        assert torch.equal(held(again, lane), held(tiers, other))
    state = tiers.state()
    for name in ("waiting.0", "bounds.1", "0.0", "0.7", "channels.0"):
        with pytest.raises((ShapeError, RuntimeError)):
            spoilt = new(9000)
            spoilt.restore(state | {name: state[name][:1]})
            spoilt.check(Extent(LANES, 1007, DIM, DIM))


def test_what_attention_reads_is_near_to_what_was_taken() -> None:
    """Tier by tier: few bits are farther away, products with codes are those of what they stand for."""
    tiers, (keys, values, *_) = filled(9000, [70, *[1] * 30, 900, GROUP])
    query, errors = torch.randn(LANES, 2, 1, DIM, generator=torch.Generator().manual_seed(0)), []
    lane = torch.arange(LANES)[:, None]
    for piece in pieces(tiers)[: sum(tier.groups > 0 for tier in tiers.tiers)]:
        own, slots = piece[:2], piece.slots.long()
        assert own[0].shape == own[1].shape == (LANES, 1, slots.shape[1], DIM)
        dense = [part if isinstance(part, Tensor) else part.dense(torch.float32)[:, None] for part in own]
        pairs = zip(dense, (keys, values), strict=True)
        errors.append(sum(float((one[:, 0] - whole[lane, slots]).square().mean()) for one, whole in pairs))
        for how in (attend, attend_scored):
            assert_near(*(how(query, [Segment(*pair)], 0.3)[0] for pair in (own, dense)), 2e-3)
    assert errors == sorted(errors) and errors[-1] < 0.4  # of a variance of 2


# -- in a cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_a_roomy_budget_changes_next_to_nothing(family: str) -> None:
    """All that fits at 16 bits is there at 16 bits."""
    ids = prompt(1, 400)
    cache = KeepCache(tiny(family), "revive", 400, chunk=48)
    assert_near(read(family, cache, ids, single=6), expected(family, ids)[:, -7:], 3e-2)


def test_attention_is_counted_wherever_entries_are() -> None:
    """Without a half-life nothing that was given is forgotten until entries are gone."""
    cache = KeepCache(tiny("llama"), "h2o+tiers", 200, chunk=48)
    read("llama", cache, prompt(1, 200), single=20)
    for layer in bounded(cache):
        ((bank,), tiers) = layer.resident.banks, layer.evicted
        away = sum(tier.parts[-1].sum((1, 2)) for tier in tiers.tiers if tier.groups) + tiers.waiting[3].sum(1)
        torch.testing.assert_close(bank.scores.sum(1) + away, torch.full((2,), 200.0), atol=0.05, rtol=1e-3)
