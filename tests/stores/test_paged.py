"""Blocks shared until written: against plain tensors, under random operations; nothing leaks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from families import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import KeepCache, UsageError
from kvkeep.memory.meter import Meter
from kvkeep.stores.paged import BLOCK_SIZE, BlockPool, BlockTable, PagedLayer

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


def content(layer: PagedLayer) -> torch.Tensor:
    return layer.state()["keys"] if layer.length else torch.zeros(len(layer.table.rows), 1, 0, 2)


@settings(max_examples=40, deadline=None)
@given(operations=OPERATIONS, page=st.sampled_from([1, 64, 512]))
def test_equals_plain_tensors(operations: list[tuple[str, Any]], page: int) -> None:
    pool, meter, counter = BlockPool(), Meter(), 0.0
    layers = [PagedLayer(BlockTable(pool), meter, page, leads=True)]
    twins = [torch.zeros(3, 1, 0, 2)]
    for kind, value in operations:
        layer, twin = layers[-1], twins[-1]
        if kind == "append":
            new = torch.arange(twin.shape[0] * value * 2.0).reshape(twin.shape[0], 1, value, 2) + counter
            counter += 1000.0
            layer.update(new, new)
            layer.settle()
            twins[-1] = torch.cat([twin, new], dim=2)
        elif kind == "truncate":
            layer.truncate(value)
            twins[-1] = twin[:, :, :value]
        elif kind == "select" and layer.table.rows and max(value) < twin.shape[0]:
            layer.select(torch.tensor(value))
            twins[-1] = twin[torch.tensor(value)]
        elif kind == "fork" and layer.table.rows:
            layers.append(layer.fork(layer.table.fork(), meter))
            twins.append(twin)
        elif kind == "drop" and len(layers) > 1:
            layers.pop(0), twins.pop(0)
        for one, other in zip(layers, twins, strict=True):
            if one.table.rows:
                assert torch.equal(content(one), other)
        held: dict[int, int] = {}
        for one in layers:
            for block in (block for row in one.table.rows for block in row):
                held[block] = held.get(block, 0) + 1
        assert {block: count for block, count in enumerate(pool.counts) if count} == held
        assert sorted(pool.free) == [block for block, count in enumerate(pool.counts) if not count]
    layer = one = None  # type: ignore[assignment]
    layers.clear()
    gc.collect()
    assert not any(pool.counts)


def step(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache, logits_to_keep=1).logits


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_forks_share_a_prefix_and_do_not_see_each_other(family: str) -> None:
    model, prefix = tiny(family), torch.arange(2, 80).unsqueeze(0)
    base = KeepCache(model, "paged")
    step(model, base, prefix)
    forks = [base.fork() for _ in range(3)]
    for turn in range(3):
        for number, fork in enumerate(forks):
            own = torch.tensor([[5 + number, 30 + turn, 9]])
            alone = KeepCache(model)
            past = [torch.tensor([[5 + number, 30 + earlier, 9]]) for earlier in range(turn)]
            step(model, alone, torch.cat([prefix, *past], dim=1))
            torch.testing.assert_close(step(model, fork, own), step(model, alone, own), atol=2e-4, rtol=2e-4)
    assert base.get_seq_length() == 78 and forks[0].get_seq_length() == 87
    shared = [count for count in base.layers[-1].table.pool.counts if count == 4]
    assert len(shared) == 78 // BLOCK_SIZE  # whole blocks of the prefix are held once, by all four


def test_a_fork_that_is_gone_gives_its_blocks_back() -> None:
    model = tiny("llama")
    base = KeepCache(model, "paged")
    step(model, base, torch.arange(2, 40).unsqueeze(0))
    pool = base.layers[0].table.pool
    before = list(pool.counts)
    fork = base.fork()
    step(model, fork, torch.arange(2, 60).unsqueeze(0))
    assert pool.counts != before
    del fork
    gc.collect()
    assert [count for count in pool.counts if count] == [count for count in before if count]


def test_beams_do_not_copy_the_prompt() -> None:
    model = tiny("llama")
    cache = KeepCache(model, "paged")
    step(model, cache, torch.arange(2, 90).unsqueeze(0))
    before = cache.memory().resident_bytes
    cache.batch_repeat_interleave(5)
    assert cache.memory().resident_bytes == before
    step(model, cache, torch.full((5, 1), 7))
    used = sum(1 for count in cache.layers[0].table.pool.counts if count)
    assert used == 88 // BLOCK_SIZE + 5  # whole blocks once, the partly filled one for each row


def test_only_paged_forks() -> None:
    with pytest.raises(UsageError, match="'full' cannot share"):
        KeepCache(tiny("llama")).fork()
