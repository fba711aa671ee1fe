"""``revive``: what is exact, what is counted, what it is worth. Its contract is in ``test_shrinking.py``."""

from __future__ import annotations

import pytest
import torch
from families import padded, read, tiny
from transformers import DynamicCache

from kvkeep import KeepCache
from kvkeep.errors import BudgetError
from kvkeep.stores.selected import SelectedLayer

BUDGET, CHUNK, PROMPT = 130, 48, 400
FAMILIES = ["llama", "gemma3", "gpt2", "deepseek_v3", "gemma4", "phi3"]


def new_cache(family: str, method: str = "revive", budget: int = BUDGET) -> KeepCache:
    return KeepCache(tiny(family), method, budget, chunk=CHUNK)


def _own(cache: KeepCache) -> list[SelectedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, SelectedLayer)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_roomy_budget_changes_next_to_nothing(family: str) -> None:
    """All that fits at 16 bits is there at 16 bits."""
    ids, mask = padded([PROMPT])
    ours = read(family, new_cache(family, budget=PROMPT), ids, mask, 6)
    theirs = read(family, KeepCache(tiny(family), "full"), ids, mask, 6)
    torch.testing.assert_close(ours, theirs, atol=3e-2, rtol=3e-2)


def test_memory_is_what_is_allocated() -> None:
    ids, mask = padded([300, 250])
    cache = new_cache("llama")
    read("llama", cache, ids, mask, 10)
    memory, tensors = cache.memory(), []
    for layer in _own(cache):
        tensors += [tensor for bank in layer.resident.banks for tensor in bank.tensors()]
    for ladder in cache.fate.ladders.values():
        tensors += [one for name, stored in ladder.stores().items() if name != "counts" for one in stored]
    assert sum(one.untyped_storage().nbytes() for one in tensors) == (
        memory.resident_bytes + memory.compressed_bytes + memory.bookkeeping_bytes - cache.ledger.nbytes
    )


def test_attention_is_counted_wherever_entries_are() -> None:
    """Without a half-life nothing that was given is forgotten until entries are gone."""
    ids, mask = padded([200])
    cache = new_cache("llama", "h2o+ladder", budget=200)
    read("llama", cache, ids, mask, 20)
    for layer in _own(cache):
        (bank,) = layer.resident.banks
        held = cache.fate.ladders[layer.index].marks[:, : cache.fate.ladders[layer.index].used].sum(1)
        torch.testing.assert_close(bank.scores.sum(1) + held, torch.full((2,), 200.0), atol=0.05, rtol=1e-3)


def test_it_beats_what_drops_and_what_quantises_alike() -> None:
    """On the tiny model: nearer to the unbounded cache's distribution than its parts are alone, in the same bytes."""
    ids, mask = padded([PROMPT, PROMPT])
    exact = read("llama", DynamicCache(config=tiny("llama").config), ids, mask, 30).log_softmax(-1)

    def divergence(method: str) -> float:
        found = read("llama", new_cache("llama", method), ids, mask, 30).log_softmax(-1)
        return float((exact.exp() * (exact - found)).sum(-1).mean())

    ours = divergence("revive")
    assert ours < divergence("h2o") and ours < divergence("h2o+quantize:4") and ours < divergence("h2o+quantize:8")


def test_too_small_a_budget_is_refused() -> None:
    with pytest.raises(BudgetError, match="no room"):
        KeepCache(tiny("llama"), "revive", 24)
