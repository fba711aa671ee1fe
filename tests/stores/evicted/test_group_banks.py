"""Codes of heads that have different numbers of places: what banks hold, and rows that come and go."""

from __future__ import annotations

import torch
from families import tiny
from helpers import allocated, counted, prompt, step

from kvkeep import KeepCache

METHOD = "kvzip+quantize:4"


def test_banks_count_the_indices_of_their_lanes() -> None:
    """Also where rows are repeated and dropped: no tensor that was there before stays."""
    cache = KeepCache(tiny("llama"), METHOD, 60, chunk=16)
    step("llama", cache, prompt(1, 200))
    assert max(len(layer.evicted.banks) for layer in cache.stream.bounded) > 1
    assert counted(cache) == allocated(cache)
    for rows in ([0, 0], [1]):
        cache.reorder_cache(torch.tensor(rows))
        assert counted(cache) == allocated(cache)


def test_a_batch_of_no_rows_can_be_forked() -> None:
    cache = KeepCache(tiny("llama"), METHOD, 60)
    step("llama", cache, prompt(2, 100))
    assert max(len(layer.evicted.banks) for layer in cache.stream.bounded) > 1
    cache.batch_select_indices(torch.tensor([], dtype=torch.int64))
    assert cache.fork().rows == cache.rows == 0


def test_a_share_of_exact_entries_is_at_least_one() -> None:
    """KVzip divides entries between heads, and there would be none to divide."""
    cache = KeepCache(tiny("llama"), f"{METHOD},exact=0.01", 60)
    step("llama", cache, prompt(1, 150))
    step("llama", cache, prompt(1, 1))
    assert all(layer.resident_bytes for layer in cache.stream.bounded) and not cache.reading
