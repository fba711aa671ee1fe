"""Codes are multiplied as they are, and stay within half a step of what they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.attention import Segment, attend, attend_scored, received
from kvkeep.memory.meter import nbytes
from kvkeep.step.native import can_join
from kvkeep.stores.evicted.coded import (
    FINE,
    GROUP,
    MARGIN,
    ByChannel,
    CodedKeys,
    CodedValues,
    encode,
    encode_keys,
    encode_values,
    group_bytes,
    multiplied,
    pack,
    unpack,
)
from kvkeep.stores.evicted.tier_sizes import waiting_bytes, waiting_form

BITS = [2, 4, 8]


def coded(
    groups: int, bits: int, dim: int = 64, lanes: int = 3
) -> tuple[CodedKeys, CodedValues, torch.Tensor, torch.Tensor]:
    """Groups of keys and values as codes, and as they were, (lanes, entries, dim)."""
    generator = torch.Generator().manual_seed(groups)
    plain = [torch.randn(lanes, groups, GROUP, dim, generator=generator) * 3 + 1 for _ in range(2)]
    keys, values = (
        [torch.stack(part, 1) for part in zip(*(code(group, bits) for group in rows.unbind(1)), strict=True)]
        for rows, code in zip(plain, (encode_keys, encode_values), strict=True)
    )
    return CodedKeys(*keys, bits), CodedValues(*values, bits), *(rows.flatten(1, 2) for rows in plain)  # type: ignore[call-arg, arg-type, return-value]


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 5), size=st.integers(1, 6), seed=st.integers(0, 99))
def test_packing_loses_nothing(bits: int, rows: int, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, size * 8 // bits), generator=generator, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.numel() * 8 == codes.numel() * bits
    assert torch.equal(unpack(packed, bits, torch.float32), codes.float())
    left = torch.randn(3, rows, generator=generator)
    torch.testing.assert_close(multiplied(left, packed, bits), left @ codes.float(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("bits", BITS)
def test_written_out_they_are_within_half_a_step(bits: int) -> None:
    coded_keys, coded_values, keys, values = coded(3, bits)
    for numbers, plain, axis in ((coded_keys, keys, 1), (coded_values, values, 2)):
        dense = numbers.dense(torch.float32)
        groups = plain.unflatten(axis, (-1, GROUP))  # of entries, or of channels
        span = groups.amax(axis + 1, keepdim=True) - groups.amin(axis + 1, keepdim=True)
        error = (dense - plain).abs().unflatten(axis, (-1, GROUP))
        # Half precision of scale and offset adds a little.
        assert (error <= span / (2**bits - 1) / 2 + 0.02).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [64, 16])
def test_products_are_those_of_what_they_stand_for(bits: int, dim: int) -> None:
    coded_keys, coded_values, *_ = coded(2, bits, dim)
    torch.manual_seed(bits)
    query, weights = torch.randn(3, 5, dim), torch.rand(3, 5, 2 * GROUP)
    dense_keys, dense_values = coded_keys.dense(torch.float32), coded_values.dense(torch.float32)
    assert coded_keys.shape == (3, 1, 2 * GROUP, dim) == coded_values.shape
    torch.testing.assert_close(coded_keys.scores(query), query @ dense_keys.transpose(1, 2), atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(coded_values.mix(weights), weights @ dense_values, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("queries", [1, 4, 30])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bits", BITS)
def test_attention_over_codes_and_numbers_together(queries: int, groups: int, bits: int) -> None:
    """Few queries multiply codes, many have them written out; with gaps, beside a plain segment. Codes are weighed,
    too, as numbers are."""
    coded_keys, coded_values, *_ = coded(groups, bits)
    torch.manual_seed(queries)
    query, own = torch.randn(3, 2, queries, 64), torch.randn(3, 1, 7, 64)
    seen, plain = torch.rand(3, 1, 1, groups * GROUP) > 0.3, Segment(own, own)
    dense = [part.dense(torch.float32)[:, None].contiguous() for part in (coded_keys, coded_values)]
    mine, yours = Segment(coded_keys, coded_values, seen), Segment(*dense, seen)
    within = {"atol": 1e-3, "rtol": 1e-3}  # products of bytes lose three digits
    theirs = attend(query, [yours, plain], 0.1)
    torch.testing.assert_close(attend(query, [mine, plain], 0.1), theirs, **within)
    if queries == 1:
        ours, weights = attend_scored(query, [mine, plain], 0.1)
        output, expected = attend_scored(query, [yours, plain], 0.1)
        torch.testing.assert_close((ours, *weights), (output, *expected), **within)
        torch.testing.assert_close(received(query, mine, theirs[1], 0.1), expected[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dim", [16, 32, 64, 96, 128])
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_the_kernel_reads_groups_as_the_numbers_they_are(bits: int, dim: int) -> None:
    """However the codes of a group lie in its bytes. In float32 there is no such kernel."""
    *codes, _, _ = coded(2, bits, dim)
    generator = torch.Generator().manual_seed(dim)
    query, own = (torch.randn(3, rows, 7, dim, generator=generator).bfloat16() for rows in (2, 1))
    mine, plain = Segment(*codes), Segment(own, own)
    dense = Segment(*(part.dense(torch.bfloat16)[:, None] for part in codes))
    assert can_join(query, mine) == can_join(query, plain)
    for found, wanted in zip(*(attend(query, [one, plain], 0.1) for one in (mine, dense)), strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("bits", BITS)
def test_bytes_of_a_group(bits: int) -> None:
    for key_dim, value_dim in ((64, 32), (16, 80)):
        parts = [
            *encode_keys(torch.randn(1, GROUP, key_dim), bits),
            *encode_values(torch.randn(1, GROUP, value_dim), bits),
        ]
        assert sum(part.nbytes for part in parts) == group_bytes(key_dim, value_dim, bits)


@pytest.mark.parametrize("spread", [0.02, 3.0, 500.0])
def test_sixteen_bits_are_within_half_a_step(spread: float) -> None:
    """Ends included, although scale and offset are half precision, which is coarser than a step."""
    rows = torch.randn(200, GROUP, generator=torch.Generator().manual_seed(1)) * spread + 2 * spread
    codes, scale, offset = encode(rows, 16)
    assert codes.dtype == torch.int16
    error = (unpack(codes, 16, torch.float32) * scale.float() + offset.float() - rows).abs()
    step = (rows.amax(1) - rows.amin(1)) / (2**16 - 1)
    assert (error.amax(1) < 0.55 * step + 4e-7 * rows.abs().amax(1)).all()
    left = torch.randn(3, 200, generator=torch.Generator().manual_seed(2))
    plain = left.double() @ (codes.double() * FINE)
    torch.testing.assert_close(multiplied(left, codes, 16), plain.float(), atol=1e-2, rtol=1e-5)


# -- bounds set in advance ------------------------------------------------------------------------------


def numbers(count: int, seed: int = 0) -> Tensor:
    """Numbers (3 lanes, ``count``, 32) of channels that differ a thousandfold."""
    scale = torch.logspace(-2, 1, 32)
    return torch.randn(3, count, 32, generator=torch.Generator().manual_seed(seed)) * scale + 3 * scale


def bounded(seen: Tensor, width: int = 2, there: Tensor | None = None) -> ByChannel:
    return ByChannel.within(seen, there, GROUP, *waiting_form(width))


def filled(bounds: ByChannel, entries: Tensor) -> ByChannel:
    """Codes of some entries."""
    return ByChannel(bounds.encoded(entries).to(bounds.codes.dtype), bounds.scale, bounds.offset)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("count", [1, 7, 32])
def test_entries_come_back_within_half_a_step(width: int, count: int) -> None:
    read, entries = filled(bounded(numbers(64, 1), width), numbers(count)), numbers(count)
    reach = read.scale.float() * torch.iinfo(read.codes.dtype).max
    inside = (entries - read.offset).abs() <= reach
    assert inside.float().mean() > 0.99
    assert ((read.dense(torch.float32) - entries).abs() <= 0.51 * read.scale.float())[inside].all()
    assert (read.dense(torch.float32) <= read.offset + 1.001 * reach).all()  # what is beyond is brought to them


def test_one_entry_at_hand_still_gives_room() -> None:
    entries = numbers(GROUP)
    error = (filled(bounded(numbers(1, 1)), entries).dense(torch.float32) - entries).square().mean().sqrt()
    assert error < 0.05 * entries.square().mean().sqrt()


def test_places_that_are_empty_set_no_bounds() -> None:
    seen, there = numbers(64, 1), torch.ones(3, 64, dtype=torch.bool)
    there[:, 40:] = False
    there[0] = False  # a lane without any
    spoilt, alone = bounded(seen.masked_fill(~there[..., None], 1e4), there=there), bounded(seen[:, :40])
    assert torch.equal(spoilt.scale[1:], alone.scale[1:]) and spoilt.scale[0].isfinite().all()


@pytest.mark.parametrize("width", [2, 4])
def test_its_bytes_are_those_counted(width: int) -> None:
    found = bounded(numbers(64), width)
    assert nbytes(found.codes, found.scale, found.offset) == 3 * 32 * waiting_bytes(width)


@pytest.mark.parametrize("count", [1, 7, 20])
def test_attention_reads_codes_as_the_numbers_they_are(count: int) -> None:
    """In bfloat16 by the kernel, where there is one, in float32 by products."""
    generator = torch.Generator().manual_seed(2)
    codes = [filled(bounded(numbers(64, seed)), numbers(count, seed + 1)) for seed in (1, 3)]
    plain_keys, plain_values = (torch.randn(3, 1, 45, 32, generator=generator) for _ in range(2))
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        query = torch.randn(3, 2, 1, 32, generator=generator).to(dtype)
        plain = Segment(plain_keys.to(dtype), plain_values.to(dtype))
        assert can_join(query, Segment(*codes)) == can_join(query, plain)
        dense = [part.dense(dtype)[:, None] for part in codes]
        found, wanted = (attend(query, [plain, Segment(*pair)], 0.05) for pair in (codes, dense))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.float(), other.float(), atol=bound, rtol=bound)


def test_the_margin_is_what_it_says() -> None:
    seen = numbers(64, 1)
    reach = bounded(seen, 4).scale * torch.iinfo(torch.int16).max
    torch.testing.assert_close(reach, (seen.amax(1, keepdim=True) - seen.amin(1, keepdim=True)) * (0.5 + MARGIN))
