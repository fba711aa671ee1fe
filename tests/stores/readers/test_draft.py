"""The reader that drafts: a round without any accepted token leaves no trace, and what is resident is chosen anew."""

from __future__ import annotations

import torch
from cases import new_cache
from families import tiny
from helpers import PROMPT, bounded, forward, prompt, step

from kvkeep import KeepCache


def kept(cache: KeepCache) -> dict[str, torch.Tensor]:
    states = (layer.state() for layer in cache.layers)
    return {f"{number}.{name}": tensor for number, state in enumerate(states) for name, tensor in state.items()}


def test_drafts_change_nothing_that_is_kept() -> None:
    """Scores, resident entries and checkpoints are those of committed tokens: a round without any leaves no trace."""
    cache = new_cache("h2o+verified, residual", "llama")
    assert cache.round is not None
    step("llama", cache, prompt())
    cache.round.draft()
    step("llama", cache, torch.tensor([[4]]))  # now the resident entries are chosen
    before = {name: tensor.clone() for name, tensor in kept(cache).items()}
    for token in (5, 6, 7):
        step("llama", cache, torch.tensor([[token]]))
    assert [layer.reader.waiting for layer in bounded(cache)] == [4] * 4
    cache.round.retract()
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


def test_entries_return_to_which_attention_returns() -> None:
    """Before a draft the resident entries are those that the selector ranks highest among all."""
    cache, full = KeepCache(tiny("llama"), "tova+verified:3", 16, checkpoint="kv", where="host"), tiny("llama")
    assert cache.round is not None
    step("llama", cache, prompt())
    cache.round.draft()
    step("llama", cache, torch.tensor([[5]]))
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
    cache.round.retract()
