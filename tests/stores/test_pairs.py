"""One pass of merging neighbours: which pairs are taken, and what becomes of them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from single import greedy

from kvkeep.policies.fates.kvslimmer import KVSlimmer
from kvkeep.stores.pairs import Entries, cheapest, cheapest_pairs, merge

INF = float("inf")


@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, INF]), min_size=9, max_size=9), min_size=1, max_size=4
    ),
    wanted=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_pairs_are_greedys(rows: list[list[float]], wanted: int) -> None:
    chosen = cheapest_pairs(torch.tensor(rows), torch.full((len(rows), 1), wanted))
    assert [flags.nonzero().flatten().tolist() for flags in chosen] == [greedy(row, wanted) for row in rows]


def test_pairs_never_overlap_even_where_costs_only_fall() -> None:
    chosen = cheapest_pairs(torch.arange(300.0).flip(0)[None], torch.tensor([[300]]))
    assert not (chosen[:, 1:] & chosen[:, :-1]).any()
    assert chosen.sum() >= 12


def test_equal_neighbours_merge_without_a_trace() -> None:
    """Tokens with the same key at the same place and the same value are one that counts twice; sinks and entries that
    no query has seen are left alone."""
    key, value, ones = torch.randn(1, 1, 8).expand(-1, 6, -1), torch.randn(1, 1, 8).expand(-1, 6, -1), torch.ones(1, 6)
    slots, known = torch.arange(6, dtype=torch.int32)[None], torch.tensor([[True] * 5 + [False]])
    entries = Entries(key, value, slots, ones, ones / 6, known)
    chosen = cheapest(entries, 1, torch.tensor([[9]]))
    assert chosen.nonzero()[:, 1].tolist() == [1, 3]
    result, tally = merge(entries, chosen, KVSlimmer(cap=0), lambda keys, by: keys, torch.randn(1, 1, 8))
    assert result.slots.tolist() == [[-1, -1, 0, 2, 4, 5]] and result.counts.tolist() == [[0, 0, 1, 2, 2, 1]]
    torch.testing.assert_close(result.attention[:, 2:], torch.tensor([[1.0, 2.0, 2.0, 1.0]]) / 6)
    assert tally.tolist()[0] == 2
    for found, whole in ((result.keys, key), (result.values, value)):
        torch.testing.assert_close(found[:, 2:], whole[:, 2:])
