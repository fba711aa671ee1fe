"""``revive`` keeps the contract: bytes within the budget at every moment, rows apart, rollbacks, sessions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import padded, read, tiny
from transformers import DynamicCache

from kvkeep import KeepCache, Session, load_session, save_session
from kvkeep.errors import BudgetError
from kvkeep.stores.selected import SelectedLayer
from kvkeep.stores.whereabouts import Whereabouts

BUDGET, CHUNK, PROMPT = 130, 48, 400
FAMILIES = ["llama", "gemma3", "gpt2", "deepseek_v3", "gemma4", "phi3"]


def new_cache(family: str, method: str = "revive", budget: int = BUDGET) -> KeepCache:
    return KeepCache(tiny(family), method, budget, chunk=CHUNK)


def budget_bytes(cache: KeepCache, rows: int, budget: int) -> int:
    return rows * budget * cache.geometry.full_bytes_per_token


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_stay_within_the_budget_after_every_chunk_and_token(family: str) -> None:
    cache = new_cache(family)
    seen: list[int] = []

    def check(length: int) -> None:
        held = sum(layer.resident_bytes for layer in cache.layers if isinstance(layer, SelectedLayer))
        assert held + cache.fate.compressed_bytes <= budget_bytes(cache, 2, BUDGET)
        seen.append(length)

    cache.on_progress = check
    ids, mask = padded([PROMPT, 150])
    assert read(family, cache, ids, mask, 40).isfinite().all()
    assert seen[-1] == PROMPT and len(seen) > 45
    codes = [codes[0] for codes, layer in zip(cache.whereabouts(), cache.layers, strict=False) if layer in _own(cache)]
    for found in codes:
        assert (found == Whereabouts.QUANTISED).any() and (found == Whereabouts.RESIDENT).any()


def _own(cache: KeepCache) -> list[SelectedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, SelectedLayer)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_roomy_budget_changes_next_to_nothing(family: str) -> None:
    """All that fits at 16 bits is there at 16 bits."""
    ids, mask = padded([PROMPT])
    ours = read(family, new_cache(family, budget=PROMPT), ids, mask, 6)
    theirs = read(family, KeepCache(tiny(family), "full"), ids, mask, 6)
    torch.testing.assert_close(ours, theirs, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_do_not_see_each_other(family: str) -> None:
    """Groups are of as many slots in all rows; what is in them is each row's own."""
    ids, mask = padded([300, 280])
    others = ids.clone()
    others[0] = others[0].flip(0)
    one, other = (read(family, new_cache(family), own, mask, 40) for own in (ids, others))
    torch.testing.assert_close(one[1], other[1], atol=1e-4, rtol=1e-4)
    assert (one[0] - other[0]).abs().max() > 0.1


def test_rows_in_another_order_are_the_same_rows() -> None:
    ids, mask = padded([300, 250, 300])
    order = torch.tensor([2, 0, 1, 1])
    one, other = new_cache("llama"), new_cache("llama")
    read("llama", one, ids, mask, 3)
    read("llama", other, ids[order], mask[order], 3)
    one.reorder_cache(order)
    for step in range(36):  # long enough for a group to fall
        token = ids[order, step : step + 1]
        mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
        with torch.no_grad():
            ours, theirs = (
                tiny("llama")(token, attention_mask=mask[order], past_key_values=each).logits for each in (one, other)
            )
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)


def test_rollback_leaves_holes_and_goes_on() -> None:
    ids, mask = padded([300])
    cache = new_cache("llama")
    read("llama", cache, ids, mask, 20)
    cache.crop(-120)
    assert cache.get_seq_length() == 180
    for found in cache.whereabouts():
        assert found.shape[2] == 180
    for ladder in cache.fate.ladders.values():
        assert all(int(slots.max()) < 180 for _, slots in ladder.pieces())
    with torch.no_grad():
        out = tiny("llama")(ids[:, 180:260], past_key_values=cache).logits
    assert out.isfinite().all() and cache.get_seq_length() == 260


def test_a_session_goes_on_as_if_it_had_not_been_saved(tmp_path: Path) -> None:
    ids, mask = padded([300])
    cache = new_cache("llama")
    read("llama", cache, ids, mask, 5)
    save_session(tmp_path / "s", Session(cache, ids.tolist()))
    again = load_session(tmp_path / "s", tiny("llama")).cache
    for step in range(36):
        with torch.no_grad():
            ours, theirs = (
                tiny("llama")(ids[:, step : step + 1], past_key_values=each).logits for each in (cache, again)
            )
        assert torch.equal(ours, theirs)


def test_memory_is_what_is_allocated() -> None:
    ids, mask = padded([300, 250])
    cache = new_cache("llama")
    read("llama", cache, ids, mask, 10)
    memory, tensors = cache.memory(), []
    for layer in _own(cache):
        tensors += [tensor for bank in layer.banks for tensor in bank.tensors()]
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
        (bank,) = layer.banks
        held = cache.fate.ladders[layer.index].marks[:, : cache.fate.ladders[layer.index].used].sum(1)
        torch.testing.assert_close(bank.marks.sum(1) + held, torch.full((2,), 200.0), atol=0.05, rtol=1e-3)


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
