"""Blocks shared until written: against plain tensors, under random operations; nothing leaks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from families import tiny
from helpers import prompt, step
from hypothesis import given, settings
from hypothesis import strategies as st
from kvkeep_lab.published.paged import BLOCK_SIZE, BlockRows, PagedLayer, fork

from kvkeep import KeepCache

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


@settings(max_examples=40, deadline=None, derandomize=True)
@given(operations=OPERATIONS)
def test_equals_plain_tensors(operations: list[tuple[str, Any]]) -> None:
    stores, twins, counter = [BlockRows()], [torch.zeros(3, 1, 0, 2)], 0.0
    pool = stores[0].pool
    for kind, value in operations:
        own, twin = stores[-1], twins[-1]
        if kind == "append":
            new = torch.arange(twin.shape[0] * value * 2.0).reshape(twin.shape[0], 1, value, 2) + counter
            counter += 1000.0
            own.append(new)
            twins[-1] = torch.cat([twin, new], 2)
        elif kind == "truncate":
            own.truncate(value)
            twins[-1] = twin[:, :, :value]
        elif kind == "select" and own.table and max(value) < twin.shape[0]:
            own.select(torch.tensor(value))
            twins[-1] = twin[torch.tensor(value)]
        elif kind == "fork" and own.table:
            stores.append(BlockRows())
            stores[-1].share(own)
            twins.append(twin)
        elif kind == "drop" and len(stores) > 1:
            stores.pop(0), twins.pop(0)
        held: dict[int, int] = {}
        for one, other in zip(stores, twins, strict=True):
            if one.table:
                assert torch.equal(one.view(), other)
            for block in (block for row in one.table for block in row):
                held[block] = held.get(block, 0) + 1
        assert +pool.counts == held
    own = one = None  # type: ignore[assignment]
    stores.clear()
    assert not +pool.counts


def counts(cache: KeepCache) -> list[int]:
    layer = next(layer for layer in cache.layers if isinstance(layer, PagedLayer))
    return [*(+layer.blocks[0].pool.counts).values()]


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_forks_share_a_prefix_and_give_their_blocks_back(family: str) -> None:
    base = KeepCache(tiny(family), "paged")
    step(family, base, prompt(1, 78))
    before, forks = counts(base), [fork(base) for _ in range(3)]
    for number, one in enumerate(forks):
        step(family, one, prompt(1, 9, seed=number))
    assert counts(base).count(4) == 78 // BLOCK_SIZE  # whole blocks of the prefix are held once, by all four
    del one, forks
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
