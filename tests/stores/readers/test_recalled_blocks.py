"""Recalled blocks: exact up to a number of tokens, and beyond it chosen blocks before the newest entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny
from torch import Tensor

from kvkeep import BudgetError, Exactness, KeepCache, UsageError
from kvkeep.attention import Segment, attend
from kvkeep.policies.methods import resolve
from kvkeep.serve.arbiter import peak_bytes
from kvkeep.stores.readers.recalled_blocks import RecalledBlocks, centroids_of

FAMILIES = ("llama", "qwen3", "gemma3", "phi3", "qwen3_next")
SPEC = "endless+blocks:count=3,size=16,representatives={},exact=64"


def _ids(count: int, rows: int = 1) -> Tensor:
    return torch.randint(3, 90, (rows, count), generator=torch.Generator().manual_seed(5))


def _logits(model: Any, cache: KeepCache, ids: Tensor, steps: int = 8) -> Tensor:
    """Return the logits of the last ``steps`` tokens, read one by one after the others."""
    with torch.no_grad():
        model(ids[:, :-steps], cache=cache)
        return torch.cat([model(ids[:, at : at + 1], cache=cache).logits for at in range(-steps, -1)], 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["endless+blocks:count=3,size=16", "endless+blocks:count=20,size=16,exact=40"])
def test_all_entries_or_all_blocks_are_full_attention(family: str, spec: str) -> None:
    model, ids = tiny(family), _ids(150, rows=2)
    found = _logits(model, KeepCache(model, spec, 24, chunk=16, where="disk"), ids)
    wanted = _logits(model, KeepCache(model, "full"), ids)
    assert torch.allclose(found, wanted, atol=2e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_blocks_are_attended_at_the_places_before_the_newest(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turning the queries is turning the keys, and the blocks have the greatest shares of attention."""
    recalled, chosen_blocks, calls = RecalledBlocks._recalled, RecalledBlocks._chosen, []

    def compare(self: RecalledBlocks, step: Any, chosen: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        output, lse = recalled(self, step, chosen, blocks)
        keys, values = self.checkpoint.blocks(self.index, chosen, self.size)
        count = chosen.shape[1]
        moved = (torch.arange(blocks - count, blocks) - chosen) * self.size
        keys = self._turned(keys.flatten(1, 2)[:, None], moved.repeat_interleave(self.size, 1))
        wanted, wanted_lse = attend(step.query, [Segment(keys, values.flatten(1, 2)[:, None])], step.scaling)
        assert torch.allclose(output, wanted, atol=1e-3) and torch.allclose(lse, wanted_lse, atol=1e-3)
        calls.append(bool((moved > 0).any()))
        return output, lse

    def check(self: RecalledBlocks, layer: Any, step: Any, blocks: int) -> Tensor:
        chosen = chosen_blocks(self, layer, step, blocks)
        assert bool((chosen[:, 0] == 0).all()) and bool((chosen.diff(dim=1) > 0).all())
        if blocks > self.count:  # a representative is a key: the shares are those of attention itself
            keys, _ = self.checkpoint.between(self.index, 0, blocks * self.size)
            plain = self._turned(keys[:, None], -torch.arange(blocks * self.size)[None])
            slots = torch.arange(layer.ledger.length - step.queries, layer.ledger.length)
            queries = self._turned(step.query, (layer.length - layer.resident.evicted - slots)[None])
            weights = (queries @ plain.mT * step.scaling).softmax(-1).unflatten(-1, (blocks, -1)).sum(-1).amax((1, 2))
            left = weights.scatter(1, chosen, 0.0).amax(1)
            assert bool((weights.gather(1, chosen[:, 1:]).amin(1) >= left - 1e-4).all())
        return chosen

    monkeypatch.setattr(RecalledBlocks, "_recalled", compare)
    monkeypatch.setattr(RecalledBlocks, "_chosen", check)
    model = tiny(family)
    _logits(model, KeepCache(model, SPEC.format(16), 24, chunk=16, where="host"), _ids(230))
    assert any(calls)


def test_a_text_longer_than_the_positions_stays_within_the_budget() -> None:
    model, ids = tiny("llama"), _ids(700)
    cache, held = KeepCache(model, SPEC.format(8), 32, chunk=32, where="host"), set()
    with torch.no_grad():
        for part in ids.split(50, 1):
            assert model(part, cache=cache).logits.isfinite().all()
            states = cache.entry_states()
            assert all(int((layer == 1).sum(-1).max()) <= 32 for layer in states)
            held.add(cache.resident_bytes())
    assert len(held) == 1
    assert cache.exactness == Exactness.REVERSIBLE and "exact up to 64 tokens" in cache.describe()[0].note


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_the_planner_counts_representatives_and_blocks(family: str) -> None:
    model, ids = tiny(family), _ids(450)
    cache = KeepCache(model, SPEC.format(16), 24, chunk=16, where="host")
    granted = [peak_bytes(cache, length) for length in (60, 449, 450)]
    with torch.no_grad():
        for part, most in zip(ids.split([60, 389, 1], 1), granted, strict=True):
            model(part, cache=cache)
            assert cache.memory().bytes <= most
    layers = cache.geometry.full_layers
    held = sum(cache.layers[layer.index].reader.bookkeeping_bytes for layer in layers)
    assert 0 < held == sum(cache.method.recall.holds(layer, cache.geometry, 450, 426).bookkeeping for layer in layers)


def test_crop_and_fork_find_the_same_representatives_again() -> None:
    model, ids = tiny("llama"), _ids(200)
    cache = KeepCache(model, SPEC.format(8), 24, chunk=16, where="host")
    with torch.no_grad():
        model(ids, cache=cache)
        copy = cache.fork()
        wanted = model(ids[:, :1], cache=cache).logits
        assert torch.allclose(model(ids[:, :1], cache=copy).logits, wanted, atol=1e-4)
        cache.crop(-1)
        assert torch.allclose(model(ids[:, :1], cache=cache).logits, wanted, atol=1e-3)


def test_centroids_are_means_of_their_keys() -> None:
    corners = torch.tensor([[4.0, 0.0], [0.0, 4.0], [-4.0, 0.0], [0.0, -4.0]])
    keys = corners[torch.arange(16) % 4][None, None].roll(0)
    centroids, members = centroids_of(keys[:, :, torch.arange(16).sort(stable=True).indices], 16)
    assert int(members.sum()) == 16
    means = (members[..., None] * centroids).sum(2) / 16
    assert torch.allclose(means, keys.mean(2), atol=1e-5)


def test_what_cannot_be_recalled_is_refused() -> None:
    for spec in (
        "window+blocks",
        "h2o+checkpoint:kv+blocks",
        "kv-direct+blocks",
        "endless:residual",
        "endless+pages:2",
    ):
        with pytest.raises(UsageError):
            resolve(spec)
    for spec in ("endless+blocks:size=100", "endless+blocks:representatives=5", "endless+blocks:0"):
        with pytest.raises(UsageError):
            resolve(spec)
    with pytest.raises(BudgetError, match="need"):
        KeepCache(tiny("llama"), "endless", 64)
    with pytest.raises(UsageError, match="capacity"):
        KeepCache(tiny("llama"), SPEC.format(8), 24, capacity=100)
    model, mask = tiny("llama"), torch.ones(2, 100, dtype=torch.long)
    mask[0, :9] = 0
    with pytest.raises(UsageError, match="padding"):
        model(_ids(100, rows=2), attention_mask=mask, cache=KeepCache(model, SPEC.format(8), 24, chunk=16))
