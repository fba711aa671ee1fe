"""What waits: near its numbers, within bounds, products those of what it decodes to, bytes as counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.memory.meter import nbytes
from kvkeep.step.native import can_join
from kvkeep.stores.evicted.groups import GROUP
from kvkeep.stores.evicted.waiting import MARGIN, Waiting, waiting_bytes

LANES, DIM, VALUE_DIM = 3, 32, 16


def numbers(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-2, 1, DIM)
    keys = torch.randn(LANES, count, DIM, generator=generator) * scale + 3 * scale
    return keys, torch.randn(LANES, count, VALUE_DIM, generator=generator)


def begun(width: int, seen: int, coded: bool = True) -> Waiting:
    waiting = Waiting(width, coded)
    waiting.begin(numbers(seen, 1), None)
    return waiting


@settings(max_examples=20, deadline=None, derandomize=True)
@given(width=st.sampled_from([2, 4]), counts=st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_entries_come_back_within_half_a_step(width: int, counts: list[int]) -> None:
    waiting, keys, values = begun(width, 64), *numbers(sum(counts))
    for fresh in zip(keys.split(counts, 1), values.split(counts, 1), strict=True):
        waiting.add(*fresh)
    assert waiting.count == sum(counts)
    for given_, read in zip((keys, values), waiting.read(waiting.count), strict=True):
        reach = read.scale.float() * torch.iinfo(read.codes.dtype).max
        inside = (given_ - read.offset).abs() <= reach
        assert inside.float().mean() > 0.99
        error = (read.dense(torch.float32) - given_).abs()
        assert (error <= 0.51 * read.scale.float())[inside].all()
        assert (read.dense(torch.float32) <= read.offset + 1.001 * reach).all()  # what is beyond is brought to them


def test_one_entry_at_hand_still_gives_room() -> None:
    waiting, (keys, values) = begun(2, 1), numbers(GROUP)
    waiting.add(keys, values)
    error = (waiting.read()[0].dense(torch.float32) - keys).square().mean().sqrt()
    assert error < 0.05 * keys.square().mean().sqrt()


def test_places_that_are_empty_set_no_bounds() -> None:
    keys, values = numbers(64, 1)
    there = torch.ones(LANES, 64, dtype=torch.bool)
    there[:, 40:] = False
    there[0] = False  # a lane without any
    spoilt = keys.masked_fill(~there[..., None], 1e4)
    waiting, alone = Waiting(2), Waiting(2)
    waiting.begin((spoilt, values), there)
    alone.begin((keys[:, :40], values[:, :40]), None)
    assert torch.equal(waiting.parts[1][1:], alone.parts[1][1:])
    assert waiting.parts[1][0].isfinite().all()


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("coded", [True, False])
def test_its_bytes_are_those_counted(width: int, coded: bool) -> None:
    assert nbytes(*begun(width, 64, coded).parts) == LANES * (DIM + VALUE_DIM) * waiting_bytes(width, coded)


@pytest.mark.parametrize("count", [1, 7, 20])
def test_attention_reads_codes_as_the_numbers_they_are(count: int) -> None:
    """In bfloat16 by the kernel, where there is one, in float32 by products."""
    generator = torch.Generator().manual_seed(2)
    waiting, (keys, _) = begun(2, 64), numbers(count)
    waiting.begin((numbers(64, 1)[0], numbers(64, 3)[0]), None)
    waiting.add(keys, numbers(count, 4)[0])
    plain_keys, plain_values = (torch.randn(LANES, 1, 45, DIM, generator=generator) for _ in range(2))
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        query = torch.randn(LANES, 2, 1, DIM, generator=generator).to(dtype)
        plain = Segment(plain_keys.to(dtype), plain_values.to(dtype))
        coded = waiting.read(count)
        assert can_join(query, Segment(*coded)) == can_join(query, plain)
        dense = [part.dense(dtype)[:, None] for part in coded]
        found, wanted = (attend(query, [plain, Segment(*pair)], 0.05) for pair in (coded, dense))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.float(), other.float(), atol=bound, rtol=bound)


def test_the_margin_is_what_it_says() -> None:
    keys, values = numbers(64, 1)
    waiting = begun(4, 64)
    reach = waiting.parts[1] * torch.iinfo(torch.int16).max
    spread = keys.amax(1, keepdim=True) - keys.amin(1, keepdim=True)
    torch.testing.assert_close(reach, spread * (0.5 + MARGIN))
    assert values.shape[2] == waiting.parts[4].shape[2]
