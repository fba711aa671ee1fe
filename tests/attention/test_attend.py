"""attend() over any partition of the keys is attention over all of them, received() what the explicit matrix of its
weights says, and a step what was asked, by lane."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.attention import Segment, attend, attend_scored, received
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.step.torch import BLOCK

SCALING = 0.4


def scores_of(query: Tensor, key: Tensor, added: Tensor) -> Tensor:
    """The textbook: (batch, heads, queries, entries) in double precision, with what the masks add."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1).double()
    return query.double() @ key.transpose(-1, -2) * SCALING + added.double()


def dense(query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> Tensor:
    """The textbook: one softmax over all scores."""
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1).double()
    return scores_of(query, key, added).softmax(-1).nan_to_num(0.0) @ value


def lower(queries: int, entries: int) -> Tensor:
    """The causal mask, as it is added to scores."""
    return torch.full((queries, entries), float("-inf")).triu(1)


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))


def near(ours: Tensor, theirs: Tensor, atol: float = 1e-5, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(ours.double(), theirs, atol=atol, rtol=rtol)


# -- attend ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    queries=st.integers(1, 5),
    kv_heads=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 3]),
    value_dim=st.sampled_from([8, 5]),
    seed=st.integers(0, 10**6),
    masked=st.booleans(),
)
def test_any_partition(
    cuts: list[int], queries: int, kv_heads: int, groups: int, value_dim: int, seed: int, masked: bool
) -> None:
    generator, entries = torch.Generator().manual_seed(seed), sum(cuts)
    query, key, value = (
        torch.randn(2, *shape, generator=generator)
        for shape in ((kv_heads * groups, queries, 8), (kv_heads, entries, 8), (kv_heads, entries, value_dim))
    )
    mask = torch.rand(2, 1, queries, entries, generator=generator) > (0.5 if masked else -1)
    parts = zip(key.split(cuts, 2), value.split(cuts, 2), mask.split(cuts, 3), strict=True)
    segments = (Segment(*pair, own if masked else None) for *pair, own in parts)
    near(attend(query, segments, SCALING)[0], dense(query, key, value, additive(mask)), rtol=1e-5)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    key = torch.randn(1, 1, 4, 8)
    mask = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    mask[..., 0, :] = False
    output = attend(torch.randn(1, 1, 2, 8), [Segment(key, key, mask), Segment(key, key, mask)], 1.0)[0]
    assert (output[0, 0, 0] == 0).all()
    assert output.isfinite().all()
    both, seen = key.expand(2, -1, -1, -1), mask[0, 0][:, None, None]
    output, (weights,) = attend_scored(torch.randn(2, 1, 1, 8), [Segment(both, both, seen)], 1.0)
    assert not output[0].any() and not weights[0].any()
    torch.testing.assert_close(weights[1].sum(), torch.tensor(1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_combined_and_summed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 300, 8).to(dtype), torch.randn(1, 1, 300, 8).to(dtype)
    parts = [Segment(part, part) for part in key.split(4, 2)]
    output, lse = attend(query, parts, SCALING)
    assert output.dtype == dtype
    near(output, dense(query, key, key, torch.zeros(())), 1e-2, 1e-2)
    got = received(query, Segment(key, key), lse, SCALING)
    assert got.dtype == torch.float32
    near(got, scores_of(query, key, torch.zeros(())).softmax(-1).sum(2).mean(1), 1e-2, 2e-2)


def test_nothing_to_attend_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        attend(torch.randn(1, 1, 1, 8), [], 1.0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_weighed_is_attend_with_its_weights(masked: bool, heads: int) -> None:
    query, key, value = torch.randn(3, 4, 1, 8), torch.randn(3, heads, 9, 8), torch.randn(3, heads, 9, 5)
    mask = (torch.rand(3, 1, 1, 9) > 0.4).index_fill(3, torch.tensor([0]), True) if masked else None
    segment = Segment(key, value, mask)
    other = Segment(torch.randn(3, 1, 4, 8), torch.randn(3, 1, 4, 5), torch.rand(3, 1, 1, 4) > 0.5)
    for reduce, segments in (("sum", [segment]), ("sum", [segment, other]), ("max", [segment, other])):
        output, shares = attend_scored(query, segments, 0.3, reduce)
        expected, lse = attend(query, segments, 0.3)
        torch.testing.assert_close(output, expected)
        for share, part in zip(shares, segments, strict=True):
            torch.testing.assert_close(share, received(query, part, lse, 0.3, reduce=reduce))


# -- received -------------------------------------------------------------------------------------------


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
    both = torch.cat([held, fresh], 2)
    blank = added.expand(3, 1, queries, past)
    scores = scores_of(query, both, torch.cat([blank, lower(queries, queries).expand(3, 1, -1, -1)], 3))
    near(lse, scores.logsumexp(-1), rtol=1e-5)
    weights = scores.softmax(-1)
    near(output, weights @ both.double())
    asked = weights[:, :, -last:] if last is not None else weights
    for reduce, shares in (("sum", asked.sum(2).mean(1)), ("max", asked.amax((1, 2)))):
        for segment, share in zip(segments, shares.split([past, queries], 1), strict=True):
            near(received(query, segment, lse, SCALING, last, reduce=reduce), share)
    in_turn = attend(query, segments[1:], SCALING, before=attend(query, segments[:1], SCALING))
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
    near(received(query, segment, lse, SCALING, last), asked.sum(2).mean(1), 1e-4)


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
        for part, place, row in ((part, *at) for part, own in zip(parts, rows, strict=True) for at in enumerate(own)):
            own, count = torch.cat([part.key[place], new[row]], 1)[None], part.key.shape[2]
            added = torch.zeros(1) if part.mask is None else additive(part.mask[place])
            seen = torch.cat([added.expand(1, 3, count), lower(3, 3)[None]], 2)
            scores = scores_of(query[row][None], own, seen)
            weights = scores.softmax(-1)
            near(lse[row][None], scores.logsumexp(-1), rtol=1e-5)
            near(output[row][None], weights @ own.double() * 2)
            near(received(query, part, lse, SCALING)[place], weights.sum(2).mean(1)[0, :count])


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
    near(received(query, segment, lse, SCALING), scores_of(query, key, lower(3, 3)).softmax(-1).sum(2).mean(1))


# -- a step ---------------------------------------------------------------------------------------------


def folded(
    queries: int, new: int, mask: Tensor | None = None, heads: int = 2
) -> tuple[AttentionInputs, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 3 * heads, queries, 8, generator=generator)
    key, value = (torch.randn(3, heads, new, 8, generator=generator) for _ in range(2))
    return AttentionInputs.of(SimpleNamespace(), query, key, value, mask, SCALING, heads, True, True), query, key, value


@pytest.mark.parametrize(("queries", "new"), [(1, 1), (4, 4), (2, 4), (1, 4)])
def test_lanes_are_the_kv_heads_of_rows_and_what_is_new_is_seen_causally(queries: int, new: int) -> None:
    """Also where only the last tokens' queries were asked for; the answer is folded back as it was asked."""
    step, query, key, value = folded(queries, new)
    assert (step.new, step.queries, step.latent) == (new, queries, False)
    assert step.query.shape == (6, 3, queries, 8) and step.key.shape == (6, 1, new, 8)
    ours = step.unfolded(attend(step.query, [step.arriving()], SCALING)[0])
    near(ours, dense(query, key, value, lower(new, new)[new - queries :]), rtol=1e-5)


def test_a_callers_mask_is_by_lane_and_wide_where_it_covers_the_past() -> None:
    over_new, over_all = (torch.rand(3, 1, 4, size) > 0.3 for size in (4, 11))
    for mask in (None, over_new):
        step = folded(4, 4, mask)[0]
        assert step.wide(7) is None
    assert folded(4, 4, over_new)[0].arriving().mask.tolist() == over_new.repeat_interleave(2, 0).tolist()
    step = folded(4, 4, over_all)[0]
    wide = step.wide(7)
    assert wide is not None and torch.equal(wide, over_all.repeat_interleave(2, 0)) and step.wide(6) is None
    assert torch.equal(step.arriving().mask, over_all[..., 7:].repeat_interleave(2, 0))
    assert torch.equal(folded(4, 4, over_all[:1])[0].wide(7), over_all[:1].expand(6, -1, -1, -1))


def test_what_a_module_expands_is_expanded() -> None:
    latent = SimpleNamespace(expand_kv=lambda keys, values: (keys * 2, values * 3))
    key = torch.randn(2, 1, 3, 8)
    step = AttentionInputs.of(latent, key, key, key, None, 1.0, 1, True, True)
    assert step.latent and torch.equal(step.expanded(key, key)[1], key * 3)
