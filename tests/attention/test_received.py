"""received() is what the explicit matrix of attention weights says, and attend() tells the truth about log-sum-exp."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.attention import Segment, attend, received
from kvkeep.attention.received import BLOCK

SCALING = 0.4


def scores_of(query: Tensor, key: Tensor, added: Tensor) -> Tensor:
    """The textbook: (batch, heads, queries, entries) in double precision, with what the masks add."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1).double()
    return query.double() @ key.transpose(-1, -2) * SCALING + added.double()


def lower(queries: int, entries: int) -> Tensor:
    """The causal mask, as it is added to scores."""
    return torch.full((queries, entries), float("-inf")).triu(1)


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    queries=st.integers(1, 9),
    past=st.integers(1, 9),
    groups=st.sampled_from([1, 3]),
    last=st.one_of(st.none(), st.integers(1, 12)),
    kind=st.sampled_from(["none", "bool", "float", "one row"]),
    seed=st.integers(0, 10**6),
)
def test_received_is_a_sum_over_the_weights(
    queries: int, past: int, groups: int, last: int | None, kind: str, seed: int
) -> None:
    """Entries of the past under a mask, and new ones seen causally; a lane has one key head."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query, held, fresh = random(3, groups, queries, 8), random(3, 1, past, 8), random(3, 1, queries, 8)
    seen = torch.rand(3, 1, 1 if kind == "one row" else queries, past, generator=generator) > 0.4
    mask: Tensor | None = seen
    added = additive(seen)
    if kind == "none":
        mask, added = None, torch.zeros(())
    elif kind == "float":
        mask = added = added + random(*seen.shape)  # a bias is not only yes or no
    segments = [Segment(held, held, mask), Segment(fresh, fresh, causal=True)]
    output, lse = attend(query, segments, SCALING)
    blank = added.expand(3, 1, queries, past)
    scores = scores_of(
        query, torch.cat([held, fresh], 2), torch.cat([blank, lower(queries, queries).expand(3, 1, -1, -1)], 3)
    )
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    weights = scores.softmax(-1)
    torch.testing.assert_close(output.double(), weights @ torch.cat([held, fresh], 2).double(), atol=1e-5, rtol=1e-4)
    asked = weights[:, :, -last:] if last is not None else weights
    expected = asked.sum(2).mean(1).split([past, queries], 1)
    for segment, share in zip(segments, expected, strict=True):
        torch.testing.assert_close(received(query, segment, lse, SCALING, last).double(), share, atol=1e-5, rtol=1e-4)
    most = asked.amax((1, 2)).split([past, queries], 1)
    for segment, share in zip(segments, most, strict=True):
        found = received(query, segment, lse, SCALING, last, reduce="max")
        torch.testing.assert_close(found.double(), share, atol=1e-5, rtol=1e-4)
    in_turn = attend(query, segments[1:], SCALING, attend(query, segments[:1], SCALING))
    torch.testing.assert_close(in_turn, (output, lse), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("last", [None, 1, BLOCK, BLOCK + 7])
@pytest.mark.parametrize("masked", [False, True])
def test_more_queries_than_stand_in_memory_at_once(last: int | None, masked: bool) -> None:
    torch.manual_seed(0)
    queries = 2 * BLOCK + 5
    query, key = torch.randn(2, 2, queries, 8), torch.randn(2, 1, queries, 8)
    flags = torch.ones(queries, queries, dtype=torch.bool).tril()
    segment = Segment(key, key, flags[None, None]) if masked else Segment(key, key, causal=True)
    lse = attend(query, [segment], SCALING)[1]
    weights = scores_of(query, key, lower(queries, queries)).softmax(-1)
    asked = weights if last is None else weights[:, :, -last:]
    torch.testing.assert_close(
        received(query, segment, lse, SCALING, last).double(), asked.sum(2).mean(1), atol=1e-4, rtol=1e-4
    )


def test_rows_receive_from_their_own_queries() -> None:
    """Pieces about some rows of the batch, in any order: attention, log-sum-exp and what was received."""
    torch.manual_seed(0)
    query, new = torch.randn(4, 2, 3, 8), torch.randn(4, 1, 3, 8)
    rows = [torch.tensor([3, 0]), torch.tensor([1, 2])]
    keys = [torch.randn(2, 1, 5, 8), torch.randn(2, 1, 7, 8)]
    masks = [torch.rand(2, 1, 1, 5) > 0.3, None]
    parts = [Segment(key, key * 2, mask, lanes=index) for key, mask, index in zip(keys, masks, rows, strict=True)]
    fresh = Segment(new, new * 2, causal=True)
    for segments in ([*parts, fresh], [fresh, *parts], [parts[1], fresh, parts[0]]):
        output, lse = attend(query, segments, SCALING)
        for part, index in zip(parts, rows, strict=True):
            for place, row in enumerate(index.tolist()):
                own = torch.cat([part.key[place : place + 1], new[row : row + 1]], 2)
                count = part.key.shape[2]
                added = torch.zeros(1, 1, 3, count) if part.mask is None else additive(part.mask[place : place + 1])
                scores = scores_of(
                    query[row : row + 1], own, torch.cat([added.expand(1, 1, 3, count), lower(3, 3)[None, None]], 3)
                )
                weights = scores.softmax(-1)
                torch.testing.assert_close(lse[row : row + 1].double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(
                    output[row : row + 1].double(), weights @ own.double() * 2, atol=1e-5, rtol=1e-4
                )
                torch.testing.assert_close(
                    received(query, part, lse, SCALING)[place].double(),
                    weights.sum(2).mean(1)[0, :count],
                    atol=1e-5,
                    rtol=1e-4,
                )


def test_rows_that_no_piece_is_about_see_nothing() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(3, 2, 2, 8), torch.randn(1, 1, 4, 8)
    output, lse = attend(query, [Segment(key, key, lanes=torch.tensor([1]))], SCALING)
    assert (output[[0, 2]] == 0).all() and (lse[[0, 2]] == float("-inf")).all()
    torch.testing.assert_close(output[1:2], attend(query[1:2], [Segment(key, key)], SCALING)[0])


def test_queries_with_infinite_lse_count_nothing() -> None:
    """That is how padding is left out."""
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 1, 6, 8)
    segment = Segment(key, key)
    lse = attend(query, [segment], SCALING)[1]
    without = received(query[:, :, 2:], segment, lse[:, :, 2:], SCALING)
    lse[:, :, :2] = float("inf")
    torch.testing.assert_close(received(query, segment, lse, SCALING), without)


@pytest.mark.parametrize("kind", ["causal", "bool", "float"])
@pytest.mark.parametrize("height", [10.0, 40.0])
def test_what_is_masked_receives_nothing_however_high_it_scores(kind: str, height: float) -> None:
    """The weight exp(score - lse) of an entry that lse does not know of can be larger than any number."""
    torch.manual_seed(0)
    query, key = torch.ones(1, 2, 3, 8), 0.1 * torch.randn(1, 1, 3, 8)
    key[:, :, 2] = height  # only the last query sees it
    flags = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    mask = {"causal": None, "bool": flags, "float": additive(flags)}[kind]
    segment = Segment(key, key, mask, causal=kind == "causal")
    lse = attend(query, [segment], SCALING)[1]
    weights = scores_of(query, key, lower(3, 3)).softmax(-1)
    torch.testing.assert_close(
        received(query, segment, lse, SCALING).double(), weights.sum(2).mean(1), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 300, 8).to(dtype), torch.randn(1, 1, 300, 8).to(dtype)
    segment = Segment(key, key, causal=True)
    got = received(query, segment, attend(query, [segment], SCALING)[1], SCALING)
    weights = scores_of(query, key, lower(300, 300)).softmax(-1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), weights.sum(2).mean(1), atol=1e-2, rtol=2e-2)
