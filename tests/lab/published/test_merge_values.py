"""Values merged into those of similar keys: the published rule in plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvkeep_lab.published.merge_values import MergeValues
from single import attended, layer_of, site
from torch.linalg import vector_norm
from torch.nn.functional import cosine_similarity

from kvkeep import UsageError
from kvkeep.contracts.entries import EvictedEntries
from kvkeep.policies.selectors.streaming_llm import StreamingLLM
from kvkeep.stores.resident.banks import Bank

DIM = 8


@pytest.mark.parametrize("least", [0.0, 0.5])
def test_the_rule_equals_the_published_one_in_plain_loops(least: float) -> None:
    """A layer of one KV head with two query heads, a prompt in chunks and then one token after another."""
    generator, budget, sinks = torch.Generator().manual_seed(5), 12, 3
    layer = layer_of(StreamingLLM(sinks, "absolute"), MergeValues(least), 1, DIM, budget)
    entries: list[dict[str, Any]] = []  # in the order of the text
    merged, dropped, length = 0, 0, 0
    for count in (9, 6, 5, *[1] * 20):
        keys, values, query = (torch.randn(1, heads, count, DIM, generator=generator) for heads in (1, 1, 2))
        ours = attended(layer, query, keys, values, 0.5)
        entries += [{"slot": length + n, "key": keys[0, 0, n], "value": values[0, 0, n]} for n in range(count)]
        theirs = []
        for n in range(count) if count > 1 else ():  # a single token evicts before it attends
            seen = entries[: len(entries) - count + n + 1]
            weights = torch.stack([query[0, :, n] @ entry["key"] * 0.5 for entry in seen], 1).softmax(1)
            theirs.append(weights @ torch.stack([entry["value"] for entry in seen]))
        gone, kept = entries[sinks : max(sinks, len(entries) - budget + sinks)], []
        kept = [entry for entry in entries if all(entry is not one for one in gone)]
        sums, totals = [entry["value"] for entry in kept], [1.0] * len(kept)
        for one in gone:
            likeness = [float(cosine_similarity(one["key"], entry["key"], dim=0)) for entry in kept]
            best = max(range(len(kept)), key=likeness.__getitem__)
            mine, its = float(vector_norm(one["value"])), float(vector_norm(kept[best]["value"]))
            if likeness[best] > least:
                weight = likeness[best] * mine / (mine + its)
                sums[best], totals[best], merged = sums[best] + weight * one["value"], totals[best] + weight, merged + 1
            else:
                dropped += 1
        for entry, total, whole in zip(kept, totals, sums, strict=True):
            entry["value"] = whole / total
        entries, length = kept, length + count
        if count == 1:
            weights = torch.stack([query[0, :, 0] @ entry["key"] * 0.5 for entry in entries], 1).softmax(1)
            theirs.append(weights @ torch.stack([entry["value"] for entry in entries]))
        torch.testing.assert_close(ours[0], torch.stack(theirs, 1), atol=1e-5, rtol=1e-4)
    assert merged and bool(dropped) == bool(least)


def test_a_rollback_removes_the_entries_with_values_of_later_tokens() -> None:
    keys = torch.eye(4)[None, :3]
    bank = Bank(None, 3, keys.clone(), torch.ones(1, 3, 2), torch.tensor([[0, 1, 2]], dtype=torch.int32), used=3)
    left = EvictedEntries(keys[:, 1:2], torch.full((1, 1, 2), 3.0), torch.tensor([[7]]))
    MergeValues().store(site(1, 4, 3), None).merge(bank, left)  # type: ignore[attr-defined]
    assert bank.newest is not None and bank.newest.tolist() == [[0, 7, 0]]
    assert bank.values[0, :, 0].tolist() == pytest.approx([1.0, (1 + 0.75 * 3) / 1.75, 1.0])
    assert bank.extra is None and torch.equal(bank.keys, keys)


def test_a_cosine_is_from_zero_to_below_one() -> None:
    for wrong in (-0.1, 1.0):
        with pytest.raises(UsageError, match="from 0 to below 1"):
            MergeValues(wrong)
