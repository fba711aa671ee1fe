"""The attention kernel: softmax attention, and bits that depend on nothing but a query and what it sees, in order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvkeep_lab.published.sketch_variants import TalliedSketch
from torch import Tensor

from kvkeep.attention import Segment, attend, attend_scored, received
from kvkeep.native.structures import BLOCK_ENTRIES as BLOCK
from kvkeep.step.native import Call, CollectedAttention, attend_all, can_join, spans_of
from kvkeep.stores.evicted.sketch import places

pytestmark = pytest.mark.usefixtures("kernels")
seeds = st.integers(0, 999)


def entries(lanes: int, count: int, dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
    return torch.randn(lanes, count, dim).bfloat16(), torch.randn(lanes, count, value_dim).bfloat16()


def cut(parts: tuple[Tensor, Tensor], at: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Entries in pieces that lie elsewhere, some of them empty."""
    edges = [0, *sorted(at), parts[0].shape[1]]
    return [
        (parts[0][:, low:high].clone(), torch.nn.functional.pad(parts[1][:, low:high], (3, 5))[..., 3:-5])
        for low, high in itertools.pairwise(edges)
    ]


def reference(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, seen: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and weights in float64; ``seen``: (lanes, queries, entries) bool; ``sinks``: of a row."""
    keys, values = (part.double().repeat(len(query) // len(part), 1, 1)[:, None] for part in (keys, values))
    scores = (query.double() @ keys.transpose(-1, -2) * scaling).masked_fill(~seen[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    if sinks is not None:
        rows = len(query) * query.shape[1] // len(sinks)
        lse = torch.logaddexp(lse, sinks.double().repeat(rows).view(len(query), -1, 1))
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return weights @ values, lse, weights


def assert_right(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, ...], values: Tensor) -> None:
    """Weights are rounded to bfloat16 once, and so is the output."""
    output, lse = found
    room = 2**-8 * float(values.double().abs().max()) + 2**-8 * wanted[0].abs()
    assert ((output.double() - wanted[0]).abs() <= room).all()
    assert torch.equal(lse.isinf(), wanted[1].isinf())
    assert (lse.double() - wanted[1]).nan_to_num(0.0).abs().max() < 1e-3
    assert not output[wanted[1].isinf()].any()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=seeds)
def test_attention_is_the_reference_however_entries_lie(data: Any, seed: int) -> None:
    """Any lanes, widths, past, first and last entry, place in blocks and mask; in pieces, and read in turns."""
    torch.manual_seed(seed)
    draw = data.draw
    own, turns, groups, queries = (draw(st.integers(1, most)) for most in (2, 2, 4, 9))
    dim, value_dim = draw(st.sampled_from([24, 64, 80])), draw(st.sampled_from([7, 16, 24, 80]))
    count, lanes = draw(st.integers(1, 1200)), own * turns
    query, held = torch.randn(lanes, groups, queries, dim).bfloat16(), entries(own, count, dim, value_dim)
    place, asking = torch.arange(count), torch.arange(queries)[None, :, None]
    seen = torch.ones(lanes, queries, count, dtype=torch.bool)
    given: dict[str, Any] = {}
    if draw(st.booleans()):
        given["past"] = past = draw(st.integers(0, count))
        seen = seen & (place <= past + asking)
        if draw(st.booleans()):
            given["window"] = window = draw(st.integers(1, count + 1))
            seen = seen & (place > past + asking - window)
    if draw(st.booleans()):
        given["first"] = first = torch.randint(0, count + 1, (lanes,))
        seen = seen & (place >= first[:, None, None])
    if draw(st.booleans()):
        given["stop"] = stop = torch.randint(0, count + 1, (lanes,))
        seen = seen & (place < stop[:, None, None])
    if draw(st.booleans()):
        given["shift"] = torch.randint(0, 2000, (lanes,))
    if draw(st.booleans()):
        mask = torch.rand(draw(st.sampled_from([1, lanes])), draw(st.sampled_from([1, queries])), count) < 0.5
        given["mask"], seen = mask, seen & mask
    if draw(st.booleans()):
        given["sinks"] = 3 * torch.randn(groups * draw(st.sampled_from([own, lanes])))
    found = Call(query, spans_of(*held), 0.3, **given).attend()
    pieces = [span for part in cut(held, draw(st.lists(st.integers(0, count), max_size=4))) for span in spans_of(*part)]
    again = Call(query, pieces, 0.3, **given).attend()
    assert found is not None and again is not None
    assert torch.equal(found[0], again[0]) and torch.equal(found[1], again[1])
    wanted = reference(query, *held, 0.3, seen, given.get("sinks"))
    assert_right(found, wanted, held[1])
    call, last = Call(query, pieces, 0.3, **given), draw(st.integers(1, queries))
    if "shift" not in given:
        for greatest in (False, True):
            own_weights = wanted[2][:, :, -last:]
            share = own_weights.amax((1, 2)) if greatest else own_weights.sum(2).mean(1)
            torch.testing.assert_close(
                call.received(found[1], last, greatest).double(), share, atol=1e-3 * last, rtol=1e-3
            )


@settings(max_examples=30, deadline=None)
@given(
    seed=seeds, count=st.integers(40, 1300), queries=st.integers(1, 40), window=st.integers(1, 1400),
    padding=st.integers(0, 700), has_sinks=st.booleans(),
)  # fmt: skip
def test_a_window_has_the_bits_of_a_mask_and_of_a_query_with_no_other_entries(
    seed: int, count: int, queries: int, window: int, padding: int, has_sinks: bool
) -> None:
    torch.manual_seed(seed)
    query, sinks = torch.randn(2, 4, queries, 24).bfloat16(), torch.randn(4) if has_sinks else None
    key, value = (part.unflatten(0, (2, 2)) for part in entries(4, count, 24, 24))
    first, slots = torch.tensor([min(padding, count - queries), 0]), torch.arange(count)
    together = attend_all(query, [(key, value)], None, 0.3, 0, first, sinks, window)
    asking = slots[-queries:, None]
    mask = (slots <= asking) & (slots > asking - window) & (slots >= first[:, None, None])
    masked = attend_all(query, [(key, value)], mask[:, None], 0.3, 0, first, sinks)
    assert together is not None and masked is not None and torch.equal(together, masked)
    for index in {0, queries // 2, queries - 1}:
        stop = count - queries + index + 1
        start = max(0, stop - window)
        seen = [(key[:, :, start:stop], value[:, :, start:stop])]
        alone = attend_all(query[:, :, index : index + 1], seen, None, 0.3, start, first, sinks)
        assert alone is not None and torch.equal(alone, together[:, :, index : index + 1])


@settings(max_examples=30, deadline=None)
@given(
    seed=seeds, count=st.integers(40, 1300), queries=st.integers(1, 40), padding=st.integers(0, 700),
    dim=st.sampled_from([24, 64, 80]), groups=st.integers(1, 4), has_sinks=st.booleans(),
)  # fmt: skip
def test_a_query_has_the_same_bits_alone_and_behind_padding(
    seed: int, count: int, queries: int, padding: int, dim: int, groups: int, has_sinks: bool
) -> None:
    """As the last of a causal text, as one of many, without the entries behind it, and in a padded row."""
    torch.manual_seed(seed)
    query = torch.randn(1, 2 * groups, queries, dim).bfloat16()
    key, value = (part[None] for part in entries(2, count, dim, dim))
    sinks = torch.randn(2 * groups) if has_sinks else None
    together = attend_all(query, [(key, value)], None, 0.3, 0, None, sinks)
    assert together is not None
    for index in {0, queries // 2, queries - 1}:
        stop = count - queries + index + 1
        alone = attend_all(
            query[:, :, index : index + 1], [(key[:, :, :stop], value[:, :, :stop])], None, 0.3, 0, None, sinks
        )
        assert alone is not None and torch.equal(alone, together[:, :, index : index + 1])
    first = torch.tensor([padding, 0])
    longer = [torch.nn.functional.pad(part, (0, 0, padding, 0)) for part in (key, value)]
    rows = [torch.cat([part, torch.randn_like(part)]) for part in longer]
    rows[0][0, :, :padding], rows[1][0, :, :padding] = 3.0, 5.0  # whatever padding has
    beside = attend_all(torch.cat([query, torch.randn_like(query)]), [rows], None, 0.3, 0, first, sinks)
    assert beside is not None and torch.equal(beside[:1], together)
    mask = torch.ones(queries, count + padding, dtype=torch.bool).tril(count + padding - queries).repeat(2, 1, 1)
    mask[0, :, :padding] = False
    masked = attend_all(torch.cat([query, query]), [rows], mask[:, None], 0.3, 0, first, sinks)
    assert masked is not None and torch.equal(masked[:1], together)
    gone = min(count - queries, 300)  # a window that has left the first ones behind
    window = torch.ones(queries, count, dtype=torch.bool).tril(count - queries).triu(gone)[None, None]
    near = attend_all(query, [(key[:, :, gone:], value[:, :, gone:])], window[..., gone:], 0.3, gone, None, sinks)
    far = attend_all(query, [(key, value)], window, 0.3, 0, None, sinks)
    assert near is not None and far is not None and torch.equal(near, far)


@settings(max_examples=40, deadline=None)
@given(
    seed=seeds, sizes=st.lists(st.sampled_from([1, 7, 100, 300, 412, 512, 513, 1024]), min_size=1, max_size=5),
    formed=st.integers(0, 31), new=st.integers(0, 20), origins=st.sampled_from([None, [0, 0], [5, 600], [512, 0]]),
    sinks=st.sampled_from([None, torch.tensor([-2.0, 0, 4])]),
)  # fmt: skip
def test_pieces_formed_one_by_one_have_the_same_bits(
    seed: int, sizes: list[int], formed: int, new: int, origins: list[int] | None, sinks: Tensor | None
) -> None:
    """However large they are and wherever blocks end: attended in several calls, the last of which may have none."""
    torch.manual_seed(seed)
    queries, count = max(1, new), sum(sizes)
    query, held = torch.randn(2, 3, queries, 24).bfloat16(), entries(2, count + new, 24, 16)
    # A query before its row's origin is padding: what it sees is nobody's.
    origin = None if origins is None else torch.tensor(origins).clamp(max=count)
    edges = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    mask = None if origin is None else (torch.arange(count + new) >= origin[:, None])[:, None, None]

    def segment(low: int, high: int, formed: bool = False, causal: bool = False) -> Segment:
        key, value = (part[:, None, low:high].clone() for part in held)
        return Segment(key, value, None if mask is None or causal else mask[..., low:high], causal, formed=formed)

    parts = [
        segment(low, high, bool(formed >> index & 1)) for index, (low, high) in enumerate(itertools.pairwise(edges))
    ]
    last = [segment(count, count + new, causal=True)] if new else []
    found = attend(query, [*parts, *last], 0.3, sinks, origin)
    once = attend(query, [segment(0, count), *last], 0.3, sinks, origin)
    assert torch.equal(found[0], once[0]) and torch.equal(found[1], once[1])
    seen = torch.ones(2, queries, count + new, dtype=torch.bool)
    seen[..., count:] = torch.ones(queries, new, dtype=torch.bool).tril()
    if mask is not None:
        seen[..., :count] &= mask[:, 0, :, :count]
    assert_right(found, reference(query, *held, 0.3, seen, sinks), held[1])


def test_whole_blocks_that_were_formed_are_all_there_is() -> None:
    """Nothing is left then for the last call, which returns what there is."""
    torch.manual_seed(0)
    query, held = torch.randn(3, 2, 1, 64).bfloat16(), entries(3, 2 * BLOCK, 64, 24)
    sinks = torch.randn(6)
    run = CollectedAttention(query, 0.2, sinks=sinks)
    for low in (0, BLOCK):
        run.add(held[0][:, low : low + BLOCK], held[1][:, low : low + BLOCK], None, False, True)
    assert run
    output, lse = run.output()
    once = Call(query, spans_of(*held), 0.2, sinks=sinks).attend(torch.float32)
    assert once is not None and torch.equal(output, once[0]) and torch.equal(lse, once[1])


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_received_and_weighed_are_by_lane_of_the_segment(reduce: str) -> None:
    torch.manual_seed(0)
    query, held = torch.randn(3, 2, 1, 64).bfloat16(), entries(3, 70, 64, 64)
    lanes = torch.tensor([2, 0, 1])
    (first, *_), (second, *_) = parts = [held[0][:, :30], held[1][:, :30]], [held[0][:, 30:], held[1][:, 30:]]
    segments = [Segment(*(part[:, None] for part in pair)) for pair in parts]
    mixed = Segment(*(part[lanes][:, None] for part in parts[0]), lanes=lanes)
    output, lse = attend(query, [mixed, segments[1]], 0.3)
    _, _, weights = reference(query, *held, 0.3, torch.ones(3, 1, 70, dtype=torch.bool))
    share = weights.amax((1, 2)) if reduce == "max" else weights.sum(2).mean(1)
    assert torch.equal(output, attend(query, segments, 0.3)[0])
    shares = [received(query, one, lse, 0.3, None, reduce).double() for one in (mixed, segments[1])]
    torch.testing.assert_close(shares[0], share[lanes, :30], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(shares[1], share[:, 30:], atol=1e-3, rtol=1e-3)
    again, split = attend_scored(query, segments, 0.3, reduce)
    assert torch.equal(again, output) and [part.shape[1] for part in split] == [first.shape[1], second.shape[1]]
    torch.testing.assert_close(torch.cat(split, 1).double(), share, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("by", ["median", "mean"])
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("queries", [1, 9])
def test_estimates_are_attended_as_if_they_were_written_out(queries: int, rows: int, by: str) -> None:
    """Beside plain entries, in tiles and blocks that they do not fill, by lanes of one mask each."""
    torch.manual_seed(rows)
    count, slots, lanes = 700, 40, 3
    held = entries(lanes, count, 32, 48)
    at = places(torch.randint(0, 2**20, (lanes, count)), rows, slots)
    sketches = [TalliedSketch(lanes, rows, slots, part.shape[2], True, True, like=part) for part in held]
    for sketch, part in zip(sketches, held, strict=True):
        sketch.insert(at, part + 3)
    keys, values = (sketch.variant(at, by, torch.full((lanes,), count), True) for sketch in sketches)
    mask = torch.rand(lanes, 1, 1, count) < 0.8
    query, more = torch.randn(lanes, 2, queries, 32).bfloat16(), entries(lanes, 45, 32, 48)
    plain = Segment(*(part[:, None] for part in more))
    sketched = Segment(keys, values, mask)
    assert can_join(query, sketched)
    found = attend(query, [plain, sketched], 0.05)
    dense = tuple(
        torch.cat([part.dense(torch.bfloat16), own], 1) for part, own in zip((keys, values), more, strict=True)
    )
    seen = torch.cat([mask[:, 0].expand(-1, queries, -1), torch.ones(lanes, queries, 45, dtype=torch.bool)], 2)
    assert_right(found, reference(query, *dense, 0.05, seen), dense[1])
