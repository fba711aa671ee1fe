"""The ladder: within its bytes at every moment, nothing lost before it has to be, the most attended highest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.attention import Segment, attend, weighed
from kvkeep.stores.coded import encode, unpack
from kvkeep.stores.groups import GROUP
from kvkeep.memory.meter import Meter
from kvkeep.stores.rungs import CLIPS, RUNGS, Ladder, group_bytes

DIM, LANES = 16, 3


def entries(start: int, count: int, lanes: int = LANES) -> list[Tensor]:
    """Keys and values, slots, and marks in another order in each lane."""
    generator = torch.Generator().manual_seed(start)
    keys, values = (torch.randn(lanes, count, DIM, generator=generator) + 2 for _ in range(2))
    slots = torch.arange(start, start + count, dtype=torch.int32).expand(lanes, -1).clone()
    return [keys, values, slots, torch.rand(lanes, count, generator=generator)]


def filled(room: int, counts: list[int]) -> tuple[Ladder, list[Tensor]]:
    ladder, start, all_taken = Ladder(room, DIM, DIM, 4, Meter()), 0, []
    for count in counts:
        all_taken.append(entries(start, count))
        ladder.take(*all_taken[-1])
        start += count
    return ladder, [torch.cat(parts, 1) for parts in zip(*all_taken, strict=True)]


@settings(max_examples=30, deadline=None)
@given(
    room=st.integers(1000, 30000),
    counts=st.lists(st.one_of(st.just(1), st.integers(1, 150)), min_size=1, max_size=12),
)
def test_bytes_never_exceed_the_room_and_nothing_is_there_twice(room: int, counts: list[int]) -> None:
    ladder, start, kept = Ladder(room, DIM, DIM, 4, Meter()), 0, [0]
    waiting = GROUP * 2 * DIM * 2
    for count in counts:
        if more := (start % GROUP + count) // GROUP:
            kept = ladder.counts(ladder.groups + more)
        ladder.take(*entries(start, count))
        start += count
        assert ladder.nbytes <= LANES * (room + waiting)
        assert ladder.groups == sum(kept)  # what is not where it could be has fallen, but is there
        for lane in range(LANES):
            slots = torch.cat([slots[lane] for _, slots in ladder.pieces()]).tolist()
            assert len(slots) == len(set(slots)) == GROUP * sum(kept) + start % GROUP
            assert all(0 <= slot < start for slot in slots)


def test_counts_use_the_room() -> None:
    ladder = Ladder(40000, DIM, DIM, 4, Meter())
    for groups in range(1, 400, 7):
        counts = ladder.counts(groups)
        used = sum(count * group_bytes(DIM, DIM, bits, 4) for count, bits in zip(counts, RUNGS, strict=True))
        assert used <= ladder.room
        if counts[0] < groups:  # not everything at 16 bits: less than a step is left
            assert ladder.room - used < 6 * group_bytes(DIM, DIM, RUNGS[0], 4)
        if sum(counts) < groups:  # what is gone is gone for room, not while much has many bits
            assert counts[0] + counts[1] <= sum(counts) / 8
    assert ladder.counts(5) == [5, *[0] * (len(RUNGS) - 1)]


def test_least_attended_fall_first_in_each_head_by_itself() -> None:
    ladder, (_, _, _, marks) = filled(9000, [GROUP] * 40)
    held = list(ladder.pieces())
    assert len(held) >= 2 and sum(slots.shape[1] for _, slots in held) < 40 * GROUP
    sums = marks.unflatten(1, (-1, GROUP)).sum(2)
    for lane in range(LANES):
        groups = [slots[lane, ::GROUP] // GROUP for _, slots in held]
        worst = [float(sums[lane][own.long()].min()) for own in groups]
        mean = [float(sums[lane][own.long()].mean()) for own in groups]
        assert mean == sorted(mean, reverse=True)
        gone = set(range(40)) - {int(group) for own in groups for group in own}
        assert gone and max(float(sums[lane][group]) for group in gone) < max(worst)
    assert not torch.equal(held[0][1][0], held[0][1][1])


def test_attention_that_returns_keeps_a_group() -> None:
    ladder, _ = filled(9000, [GROUP] * 30)
    assert ladder.marks is not None and not ladder.count
    start = ladder.used - GROUP  # the lowest of all
    spared = list(ladder.pieces())[-1][1][:, -GROUP:].clone()
    ladder.marks[:, start : ladder.used] = 1e3
    for number in range(30, 60):
        ladder.take(*entries(number * GROUP, GROUP))
    for lane in range(LANES):
        kept = torch.cat([slots[lane] for _, slots in ladder.pieces()])
        assert torch.isin(spared[lane], kept).all()


def test_what_attention_reads_is_near_to_what_was_taken() -> None:
    """Rung by rung: few bits are farther away, products with codes are those of what they stand for."""
    ladder, (keys, values, _, _) = filled(9000, [70, *[1] * 30, 900, GROUP])
    query, errors = torch.randn(LANES, 2, 1, DIM), []
    lane = torch.arange(LANES)[:, None]
    for rung, slots in ladder.pieces():
        if rung is None:
            continue
        own = rung.read(ladder.channels)
        assert own[0].shape == own[1].shape == (LANES, 1, slots.shape[1], DIM)
        dense = [part if isinstance(part, Tensor) else part.dense(torch.float32)[:, None] for part in own]
        errors.append(float((dense[1][:, 0] - values[lane, slots.long()]).square().mean()))
        errors[-1] += float((dense[0][:, 0] - keys[lane, slots.long()]).square().mean())
        mine, theirs = (attend(query, [Segment(*pair)], 0.3)[0] for pair in (own, dense))
        torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=1e-3)
        mine, theirs = (weighed(query, [Segment(*pair)], 0.3)[0] for pair in (own, dense))
        torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=1e-3)
    assert errors == sorted(errors) and errors[-1] < 0.4  # of a variance of 2


@pytest.mark.parametrize("bits", [2, 4])
def test_clipping_is_never_farther_away(bits: int) -> None:
    rows = torch.randn(50, GROUP, generator=torch.Generator().manual_seed(bits))

    def error(clips: tuple[float, ...]) -> Tensor:
        codes, scale, offset = encode(rows, bits, clips)
        return (unpack(codes, bits, torch.float32) * scale.float() + offset.float() - rows).square().sum(1)

    plain, clipped = error((1.0,)), error(CLIPS[bits])
    assert (clipped <= plain).all() and clipped.mean() < plain.mean()


def test_a_rung_knows_of_its_own_holes() -> None:
    """Attention asks for a mask only where some places are empty."""
    ladder, _ = filled(9000, [300, 1, 1])
    assert len([rung for rung in ladder.rungs if rung.groups]) > 1 and not any(rung.holes for rung in ladder.rungs)
    rows = torch.zeros(LANES, GROUP, DIM)
    slots = torch.full((LANES, GROUP), -1, dtype=torch.int32)
    ladder.take(rows, rows, slots, torch.zeros(LANES, GROUP))
    for rung, held in ladder.pieces():
        assert rung is None or rung.holes == bool((held < 0).any())
    assert any(rung.holes for rung in ladder.rungs)


def test_saved_selected_and_cut() -> None:
    ladder, _ = filled(9000, [300, 1, 1])
    ladder.heads = LANES
    again = Ladder(9000, DIM, DIM, 4, Meter())
    again.put({name: [tensor.clone() for tensor in tensors] for name, tensors in ladder.stores().items()})
    again.select(torch.tensor([0, 0]))
    for (_, mine), (_, theirs) in zip(ladder.pieces(), again.pieces(), strict=True):
        assert torch.equal(torch.cat([mine, mine]), theirs)
    again.truncate(100)
    assert all(rung.holes for rung in again.rungs) and all(int(slots.max()) < 100 for _, slots in again.pieces())
    assert all(int(slots.max()) >= 100 for _, slots in ladder.pieces())
