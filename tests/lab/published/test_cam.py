"""CaM, which merges values at random: its probabilities, and the published rule in plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvkeep_lab.published.cam import Cam
from single import attended, layer_of, site

from kvkeep.contracts.entries import EvictedEntries
from kvkeep.policies.selectors.random import sampled
from kvkeep.policies.selectors.streaming_llm import StreamingLLM
from kvkeep.stores.resident.banks import Bank

DIM = 8


@pytest.mark.parametrize("score", [0.0, 0.4, 5.0])
def test_a_value_is_merged_with_the_probability_of_its_attention_ratio(score: float) -> None:
    """The ratio is the evicted entry's attention over the mean of all later entries. The newest entry, which nothing
    has attended to yet, does not count. Keys and counts do not change."""
    lanes = 4000
    slots = torch.tensor([[30, 5, 12, 20]]).expand(lanes, -1).contiguous()
    bank = Bank(None, 4, torch.ones(lanes, 4, 2), torch.zeros(lanes, 4, 2), slots, used=4)
    bank.scores = torch.tensor([[9.0, 9.0, 0.5, 1.5]]).expand(lanes, -1).contiguous()
    extra, newest = bank.counted()
    value, gone = torch.randn(lanes, 1, 2), torch.full((lanes, 1), 10)
    left = EvictedEntries(value, value, gone, torch.full((lanes, 1), score))
    Cam(into=2).store(site(lanes, 2, 4), None).merge(bank, left)
    went = bank.values.abs().sum((1, 2)) > 0
    assert float(went.float().mean()) == pytest.approx(min(1.0, score), abs=0.04)
    for column in (2, 3):
        torch.testing.assert_close(bank.values[went][:, column], value[went, 0] / 2)
    assert (bank.values[:, :2] == 0).all() and (bank.keys == 1).all() and (extra == 0).all() and (newest == 0).all()


@pytest.mark.parametrize(("sinks", "into"), [(3, 4), (0, 32), (2, 1)])
def test_cam_equals_the_published_rule_in_plain_loops(sinks: int, into: int) -> None:
    """A layer of one KV head with two query heads, a prompt in chunks and then one token after another."""
    generator, budget, seed = torch.Generator().manual_seed(5), 12, 7
    layer = layer_of(StreamingLLM(sinks, "absolute"), Cam(into, seed), 1, DIM, budget)
    entries: list[dict[str, Any]] = []  # in the order of the text
    length, merged, kept = 0, 0, 0
    for count in (9, 6, 5, *[1] * 60):
        keys, values, query = (torch.randn(1, heads, count, DIM, generator=generator) for heads in (1, 1, 2))
        ours = attended(layer, query, keys, values, 0.5)
        new = [
            {"slot": length + n, "key": keys[0, 0, n], "value": values[0, 0, n].clone(), "weight": 0.0}
            for n in range(count)
        ]
        if count == 1 and len(entries) == budget:
            gone = entries.pop(sinks)
            after = entries[sinks:]
            chance = gone["weight"] / (sum(entry["weight"] for entry in after) / len(after))
            goes = float(sampled(torch.tensor([[gone["slot"]]]), 1, 0, seed)) < chance
            merged, kept = merged + goes, kept + (not goes)
            for entry in after[:into] if goes else []:
                entry["value"] = entry["value"] + gone["value"] / into
        entries += new
        theirs = []
        for n in range(count):
            seen = entries[: len(entries) - count + n + 1]
            scores = torch.stack([query[0, :, n] @ entry["key"] * 0.5 for entry in seen], 1)
            weights = scores.softmax(1)  # (heads, entries)
            theirs.append(weights @ torch.stack([entry["value"] for entry in seen]))
        torch.testing.assert_close(ours[0], torch.stack(theirs, 1), atol=1e-5, rtol=1e-4)
        for entry, weight in zip(entries, weights.mean(0), strict=True):
            entry["weight"] = float(weight)
        del entries[sinks : max(sinks, len(entries) - budget + sinks)]  # of a chunk: dropped
        length += count
        (bank,) = layer.resident.banks
        assert sorted(bank.slots[0, : bank.used].tolist()) == [entry["slot"] for entry in entries]
    assert merged and kept
