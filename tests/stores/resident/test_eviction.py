"""Eviction by the native library: the same entries are evicted and stay as by plain operations."""

from __future__ import annotations

import pytest
import torch
from cases import new_cache
from helpers import bounded, padded, prompt, step
from torch import Tensor

from kvkeep.passes.stream import CacheStream
from kvkeep.step import native
from kvkeep.step.native import entries, steps

NAMES = ("window", "h2o", "snapkv", "knorm", "random", "lru", "kvreviver", "h2o+merge", "pyramidkv")


def states(name: str, batch: bool) -> dict[str, Tensor]:
    """Every layer's state after a prompt, steps, a truncation that leaves empty columns, and steps."""
    cache = new_cache(name, "llama", budget=20)
    ids, mask = padded([40, 33]) if batch else (prompt(1)[:, :40], None)
    step("llama", cache, ids, mask)
    for number in range(9):
        if number == 5:
            cache.crop(-3)
            mask = None if mask is None else mask[:, :-3]
        mask = None if mask is None else torch.cat([mask, mask.new_ones(2, 1)], 1)
        step("llama", cache, ids[:, number : number + 1], mask)
    return {f"{layer.index}.{key}": part for layer in bounded(cache) for key, part in layer.state().items()}


@pytest.mark.turns(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [False, True])
def test_a_token_replaces_the_same_entry_as_by_plain_operations(
    name: str, batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    own = native.insert
    monkeypatch.setattr(native, "insert", lambda *given: (calls.append(given), own(*given)))
    monkeypatch.setattr(CacheStream, "plan", lambda self, *given: {})
    by_library = states(name, batch)
    for module in (entries, steps):
        monkeypatch.setattr(module, "library", lambda: None)
    many = len(calls)
    plain = states(name, batch)
    assert many and len(calls) == many and by_library.keys() == plain.keys()
    for key, part in by_library.items():
        assert torch.equal(part, plain[key]), key
