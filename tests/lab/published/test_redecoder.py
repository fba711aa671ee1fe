"""Evicted tokens are decoded again: against loops over the model's weights, and what is exact or lossy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import ADVANCING
from families import tiny
from helpers import bounded, prompt, step
from kvkeep_lab.published.by_hand import evict_lowest
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvkeep import KeepCache, UsageError

LIMIT, BUDGET = 5, 16
Resident = list[list[dict[int, tuple[Tensor, Tensor]]]]  # by layer and lane: key and value of each slot


def resident(cache: KeepCache) -> Resident:
    """What is resident, read from the banks themselves."""
    return [
        [
            {
                slot: (key.clone(), value.clone())
                for slot, key, value in zip(slots, keys, values, strict=False)
                if slot >= 0
            }
            for slots, keys, values in zip(bank.slots.tolist(), bank.keys, bank.values, strict=True)
        ]
        for layer in bounded(cache)
        for bank in layer.resident.banks
    ]


def chosen(before: Resident, after: Resident, first: int, length: int) -> list[int]:
    """The tokens that left most lanes in a pass of slots ``first`` to ``length``, the older first."""
    votes = [0] * length
    for was, now in zip(before, after, strict=True):
        for entries, kept in zip(was, now, strict=True):
            for slot in {*entries, *range(first, length)} - {*kept}:
                votes[slot] += 1
    return sorted(sorted(range(length), key=lambda slot: (-votes[slot], slot))[:LIMIT])


def again(ids: Tensor, slots: list[int], after: Resident) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (heads, n, dim) of each layer for tokens at ``slots``, one query and head at a time."""
    model, found = tiny("llama"), []
    hidden = model.model.embed_tokens(ids[:, slots])
    cos, sin = model.model.rotary_emb(hidden, torch.tensor([slots]))
    for layer, lanes in zip(model.model.layers, after, strict=True):
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        query, key, value = (
            project(normed)[0].unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = (part[0] for part in apply_rotary_pos_emb(query[None], key[None], cos, sin))
        found.append((key, value))
        rows = torch.zeros(query.shape[1], len(query), attention.head_dim)
        for head in range(len(query)):
            lane = head * len(key) // len(query)
            for place, at in enumerate(slots):
                seen = [entry for slot, entry in lanes[lane].items() if slot <= at]
                seen += [
                    (key[lane, other], value[lane, other])
                    for other, slot in enumerate(slots)
                    if slot <= at and slot not in lanes[lane]
                ]
                scores = torch.stack([query[head, place] @ one for one, _ in seen]) / math.sqrt(attention.head_dim)
                rows[place, head] = sum(weight * one for weight, (_, one) in zip(scores.softmax(0), seen, strict=True))
        hidden = hidden + attention.o_proj(rows.flatten(1))[None]
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return found


@pytest.mark.parametrize("selector", ["lru", "h2o", "window"])
@torch.no_grad()
def test_redecoded_entries_equal_a_decode_over_the_resident_entries(selector: str) -> None:
    """After every chunk and token: which tokens are decoded, over which entries, and which lanes take how many."""
    cache = KeepCache(tiny("llama"), f"{selector}+redecode:{LIMIT}", BUDGET, chunk=16)
    ids, (hook,) = prompt(1, 60), cache.stream.pass_hooks
    hook_before, hook_after = hook.before, hook.after
    before: Resident = []
    passes = changed = 0

    def begun(*given: Any) -> None:
        nonlocal before
        before = resident(cache) or [[{}, {}]] * 4
        hook_before(*given)

    def finished(*given: Any) -> None:
        nonlocal passes, changed
        after, length, first = resident(cache), cache.ledger.length, cache.stream._known
        slots = chosen(before, after, first, length)
        expected = again(ids, slots, after)
        hook_after(*given)
        passes += 1
        for was, kept, now, (keys, values) in zip(before, after, resident(cache), expected, strict=True):
            for lane, entries in enumerate(now):
                left = {*was[lane], *range(first, length)} - {*kept[lane]}
                back = [slot for slot in slots if slot in left][: min(LIMIT, BUDGET // 2)]
                assert {*entries} - {*kept[lane]} == {*back} and len(entries) == len(kept[lane])
                changed += len(back)
                for slot in back:
                    torch.testing.assert_close(entries[slot][0], keys[lane, slots.index(slot)], atol=2e-4, rtol=2e-4)
                    torch.testing.assert_close(entries[slot][1], values[lane, slots.index(slot)], atol=2e-4, rtol=2e-4)

    hook.before, hook.after = begun, finished
    step("llama", cache, ids[:, :52])
    for place in range(52, 60):
        step("llama", cache, ids[:, place : place + 1])
    assert passes == 12 and changed > 50
    exact = DynamicCache(config=tiny("llama").config)
    tiny("llama")(ids, cache=exact)
    wrong = [
        (key - layer.keys[0, lane, slot]).abs().max()
        for layer, lanes in zip(exact.layers, resident(cache), strict=True)
        for lane, entries in enumerate(lanes)
        for slot, (key, _) in entries.items()
    ]
    assert max(wrong) > 0.1  # it is lossy


@pytest.mark.parametrize("family", ADVANCING)
def test_redecoding_over_the_complete_text_restores_the_original_entries(family: str) -> None:
    """If everything before an evicted token is resident or decoded again with it."""
    cache, ids = KeepCache(tiny(family), "knorm+redecode:40", 64), prompt(2, 40)
    step(family, cache, ids)
    original, (hook,) = resident(cache), cache.stream.pass_hooks
    hook.before(cache, {"input_ids": ids})
    for layer in bounded(cache):
        evict_lowest(layer.resident, 2)  # other tokens in each head
    assert all(len(entries) == 38 for lanes in resident(cache) for entries in lanes)
    hook.after(cache)
    for was, now in zip(original, resident(cache), strict=True):
        for one, other in zip(was, now, strict=True):
            assert {*one} == {*other}
            for slot, (key, value) in other.items():
                torch.testing.assert_close(key, one[slot][0], atol=1e-3, rtol=1e-3)
                torch.testing.assert_close(value, one[slot][1], atol=1e-3, rtol=1e-3)


def test_redecode_refuses_embeddings_and_custom_masks() -> None:
    model, ids = tiny("llama"), prompt(1, 8)
    cache = KeepCache(model, "lru+redecode", 32)
    with pytest.raises(UsageError, match="came with embeddings; use 'fetch-on-miss'"):
        model(inputs_embeds=model.model.embed_tokens(ids), cache=cache)
    with pytest.raises(UsageError, match="came with a mask of the caller's own"):
        model(ids, cache=cache, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool).tril())
    assert cache.get_seq_length() == 0 and step("llama", cache, ids).isfinite().all()
