"""Blocks shared until written: against plain tensors, under random operations; nothing leaks."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import tiny
from helpers import bounded, prompt, step
from hypothesis import given, settings
from hypothesis import strategies as st
from single import site

from kvkeep import KeepCache
from kvkeep.stores.resident.paged import BLOCK_SIZE, BlockPool, BlockTable, Paged

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 50)),
        st.tuples(st.just("truncate"), st.integers(0, 90)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 2), min_size=1, max_size=4)),
        st.tuples(st.just("fork"), st.just(0)),
        st.tuples(st.just("drop"), st.just(0)),
    ),
    max_size=12,
)


def forked(own: Paged, where: Any) -> Paged:
    table = BlockTable(own.table.pool)
    table.share(own.table)
    other = Paged(where, table)
    other.share(own)
    return other


def read_back(own: Paged) -> torch.Tensor:
    """What attention reads, put together: (rows, slots, dim)."""
    rows = len(own.table.rows)
    whole = torch.full((rows, own.length, 2), torch.nan)
    for piece in own.pieces():
        index = torch.arange(rows) if piece.lanes is None else piece.lanes
        assert torch.equal(piece.keys, -piece.values)
        whole[index, piece.first : piece.first + piece.keys.shape[2]] = piece.keys[:, 0].expand(rows, -1, -1)
    return whole


@settings(max_examples=40, deadline=None, derandomize=True)
@given(operations=OPERATIONS, page=st.sampled_from([1, 64, 512]))
def test_equals_plain_tensors(operations: list[tuple[str, Any]], page: int) -> None:
    pool, where, counter = BlockPool(), replace(site(1, 2, 0), page=page), 0.0
    stores, twins = [Paged(where, BlockTable(pool))], [torch.zeros(3, 0, 2)]
    for kind, value in operations:
        own, twin = stores[-1], twins[-1]
        if kind == "append":
            new = torch.arange(twin.shape[0] * value * 2.0).reshape(twin.shape[0], value, 2) + counter
            counter += 1000.0
            own.arrive(new, -new)
            own.admit(new, -new, own.length)
            twins[-1] = torch.cat([twin, new], 1)
        elif kind == "truncate":
            own.truncate(value)
            twins[-1] = twin[:, :value]
        elif kind == "select" and own.table.rows and max(value) < twin.shape[0]:
            own.select(torch.tensor(value))
            twins[-1] = twin[torch.tensor(value)]
        elif kind == "fork" and own.table.rows:
            stores.append(forked(own, where))
            twins.append(twin)
        elif kind == "drop" and len(stores) > 1:
            stores.pop(0), twins.pop(0)
        held: dict[int, int] = {}
        for one, other in zip(stores, twins, strict=True):
            if one.length:
                assert torch.equal(one.state()["keys"], other) and torch.equal(read_back(one), other)
            for block in (block for row in one.table.rows for block in row):
                held[block] = held.get(block, 0) + 1
        assert {block: count for block, count in enumerate(pool.counts) if count} == held
        assert sorted(pool.free) == [block for block, count in enumerate(pool.counts) if not count]
    own = one = None  # type: ignore[assignment]
    stores.clear()
    assert not any(pool.counts)


def counts(cache: KeepCache) -> list[int]:
    return [count for count in cache.made.table.pool.counts if count]  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_forks_share_a_prefix_and_give_their_blocks_back(family: str) -> None:
    base = KeepCache(tiny(family), "paged")
    step(family, base, prompt(1, 78))
    before, forks = counts(base), [base.fork() for _ in range(3)]
    for number, fork in enumerate(forks):
        step(family, fork, prompt(1, 9, seed=number))
    assert counts(base).count(4) == 78 // BLOCK_SIZE  # whole blocks of the prefix are held once, by all four
    del fork, forks
    gc.collect()
    assert counts(base) == before


def test_beams_do_not_copy_the_prompt() -> None:
    cache = KeepCache(tiny("llama"), "paged")
    step("llama", cache, prompt(1, 88))
    before = cache.memory().resident_bytes
    cache.batch_repeat_interleave(5)
    assert cache.memory().resident_bytes == before
    step("llama", cache, torch.full((5, 1), 7))
    assert len(counts(cache)) == 88 // BLOCK_SIZE + 5  # whole blocks once, the partly filled one for each row
    assert all(layer.resident.table is cache.made.table for layer in bounded(cache))
