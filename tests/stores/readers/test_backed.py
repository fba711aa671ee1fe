"""A checkpoint of every entry: attention reads it in the order of the text, whatever is resident. Drafts leave no
trace, and what is resident is chosen anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import new_cache
from families import tiny
from helpers import PROMPT, assert_near, bounded, expected, forward, padded, prompt, read, step

from kvkeep import KeepCache
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import EntryState

BUDGET = 16


@pytest.mark.parametrize("kind", ["kv", "residual", "residual:3", "tokens"])
def test_what_is_resident_does_not_matter(kind: str) -> None:
    """Attention reads none of it: with keys and values spoilt, every logit is the same."""
    ids, logits = prompt(1, 60, seed=1), []
    for spoilt in (False, True):
        cache = KeepCache(tiny("llama"), "h2o+checkpoint", BUDGET, checkpoint=kind, chunk=16)
        step("llama", cache, ids[:, :50])
        for bank in (bank for layer in bounded(cache) for bank in layer.resident.banks if spoilt):
            bank.values.fill_(torch.nan)
        logits.append(torch.cat([step("llama", cache, token) for token in ids[:, 50:].split(1, 1)], 1))
    assert torch.equal(*logits)
    assert_near(logits[0], expected("llama", ids)[:, 50:])


def test_nothing_is_rebuilt_while_everything_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(1, 40, seed=2)
    cache = KeepCache(tiny("llama"), "h2o+checkpoint:residual", 32, chunk=16)
    rebuilt: list[int] = []
    own = cache.checkpoint.pieces
    monkeypatch.setattr(cache.checkpoint, "pieces", lambda *given, **more: rebuilt.append(1) or own(*given, **more))
    step("llama", cache, ids[:, :28])
    step("llama", cache, ids[:, 28:29])
    step("llama", cache, ids[:, 29:39])  # it attends before entries are evicted
    assert not rebuilt
    assert_near(step("llama", cache, ids[:, 39:]), expected("llama", ids)[:, -1:])
    assert len(rebuilt) == 4


def test_a_full_checkpoint_loses_its_oldest_and_says_so() -> None:
    """Each step then attends, once, to whatever is still somewhere."""
    spec, ids, seen = "streaming-llm:positions=absolute+checkpoint", prompt(1, 60), []
    cache = KeepCache(tiny("llama"), spec, BUDGET, capacity=20)
    step("llama", cache, ids[:, :20])
    assert cache.exactness == "exact"
    step("llama", cache, ids[:, 20:40])
    assert cache.exactness == "lossy"
    layer = bounded(cache)[1]
    assert layer.resident.resident_slots()[:, :4].all() and layer.reader.first == 20
    own = layer.segment

    def segment(piece: Any, asked: AttentionInputs, wide: Any, keep: Any = None) -> Any:
        count = piece.keys.shape[2]
        slots = torch.arange(piece.first, piece.first + count)[None] if piece.slots is None else piece.slots
        there = slots[:1] >= 0 if keep is None else keep[:1].gather(1, slots[:1].clamp(min=0).long())
        seen.extend(slots[:1][there].tolist())  # of the first lane
        return own(piece, asked, wide, keep)

    layer.segment = segment  # type: ignore[method-assign]
    step("llama", cache, ids[:, 40:52])
    assert sorted(seen) == [*range(4), *range(20, 40)]
    codes = cache.entry_states()[1][0, 0]
    assert (codes[:4] == EntryState.RESIDENT).all() and (codes[4:32] == EntryState.DROPPED).all()
    assert (codes[32:] != EntryState.DROPPED).all()


def test_a_budget_of_nothing_and_rows_with_padding() -> None:
    ids, mask = padded([50, 31, 9])
    for budget in (0, BUDGET):
        cache = KeepCache(tiny("llama"), "tova+checkpoint:kv", budget, chunk=7)
        assert_near(read("llama", cache, ids, mask, 10), expected("llama", ids, mask)[:, -11:])
        assert (cache.memory().resident_bytes == 0) == (budget == 0)


def kept(cache: KeepCache) -> dict[str, torch.Tensor]:
    states = (layer.state() for layer in cache.layers)
    return {f"{number}.{name}": tensor for number, state in enumerate(states) for name, tensor in state.items()}


def test_drafts_change_nothing_that_is_kept() -> None:
    """Scores, resident entries and checkpoints are those of tokens that were read exactly."""
    cache = new_cache("h2o+verified, residual", "llama")
    passes = cache.draft_passes
    assert passes is not None
    step("llama", cache, prompt())
    passes.begin(choose=True)
    before = {name: tensor.clone() for name, tensor in kept(cache).items()}
    for token in (4, 5, 6):
        step("llama", cache, torch.tensor([[token]]))
    assert [layer.reader.waiting for layer in bounded(cache)] == [3] * 4 and passes.begun == PROMPT
    passes.end()
    held = kept(cache)
    assert held.keys() == before.keys()
    for name, tensor in before.items():
        if name.endswith(("keys", "values")):  # behind the columns is the tail
            columns = held[name.rpartition(".")[0] + ".slots"].shape[1]
            assert torch.equal(held[name][:, :columns], tensor[:, :columns]), name
        else:
            assert torch.equal(held[name], tensor), name
    assert cache.get_seq_length() == PROMPT and cache.ledger.length == PROMPT
    assert all(rows.length == PROMPT for _, rows in cache.checkpoint_rows())


@pytest.mark.parametrize("wrong", [0, 3])
def test_entries_return_to_which_attention_returns(wrong: int) -> None:
    """Before drafts the resident entries are those that the selector ranks highest among all, by the attention of the
    last tokens that were not taken back."""
    cache, full = KeepCache(tiny("llama"), "tova+verified:3", 16, checkpoint="kv", where="host"), tiny("llama")
    assert cache.draft_passes is not None
    step("llama", cache, prompt()[:, :-2])
    step("llama", cache, torch.cat([prompt()[:, -2:], prompt(1, wrong, 9)], 1))
    if wrong:
        cache.crop(-wrong)
    cache.draft_passes.begin(choose=True)
    kept_attention = full.config._attn_implementation
    try:
        full.set_attn_implementation("eager")
        weights = forward(full, None, prompt(), output_attentions=True).attentions
    finally:
        full.set_attn_implementation(kept_attention)
    for layer, attention in zip(bounded(cache), weights, strict=True):
        last = attention[0, :, -1].mean(0)  # TOVA: the last query, mean over heads
        (bank,) = layer.resident.banks
        expected = set(last.topk(bank.columns).indices.tolist())
        assert all(set(row.tolist()) == expected for row in bank.slots)
    cache.draft_passes.end()
