"""Recalled blocks: exact up to a number of tokens, and beyond it chosen blocks before the newest entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny
from torch import Tensor

from kvkeep import BudgetError, Exactness, KeepCache, UsageError
from kvkeep.policies.methods import resolve
from kvkeep.serve.arbiter import peak_bytes
from kvkeep.stores.readers.recalled_blocks import RecalledBlocks

FAMILIES = ("llama", "qwen3", "gemma3", "phi3", "qwen3_next")
SPEC = "endless+blocks:count=3,size=16,exact=64"


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
    """Rotating the keys of the copies is rotating the query back, block by block."""
    copy, moves = RecalledBlocks._copy, []

    def compare(self: RecalledBlocks, layer: Any) -> None:
        copy(self, layer)
        numbers, size = self.choice.numbers, self.choice.size
        assert numbers is not None and self._copies is not None
        keys, values = self.checkpoint.blocks(self.index, numbers.repeat_interleave(layer.heads, 0), size)
        moved = (torch.arange(self.choice.blocks - numbers.shape[1], self.choice.blocks) - numbers[0]) * size
        query = torch.randn(layer.heads, 1, 1, keys.shape[-1])
        scores = query[:, 0] @ self._copies.keys.mT
        back = -moved[None].expand(layer.heads, -1)
        turned = self.adapter.turn(
            self.index, query.expand(-1, -1, len(moved), -1), self.adapter.angles(self.index, query, back)
        )
        wanted = torch.einsum("lnd,lnsd->lns", turned[:, 0], keys).flatten(1)
        assert torch.allclose(scores[:, 0], wanted, atol=1e-3) and torch.equal(
            self._copies.values, values.flatten(1, 2)
        )
        moves.append(bool((moved > 0).any()))

    monkeypatch.setattr(RecalledBlocks, "_copy", compare)
    model = tiny(family)
    _logits(model, KeepCache(model, SPEC, 24, chunk=16, where="host"), _ids(230))
    assert any(moves)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_the_block_with_the_words_of_the_question_is_recalled_in_all_layers(family: str) -> None:
    model, ids, question = tiny(family), _ids(300), torch.tensor([[91, 92, 93, 94]])
    ids[:, 70:74] = question  # in block 4
    cache = KeepCache(model, SPEC.replace("3", "6"), 24, chunk=16, where="host")
    readers = [cache.layers[layer.index].reader for layer in cache.geometry.full_layers]
    with torch.no_grad():
        model(ids, cache=cache)
        model(question, cache=cache)
        for _ in range(40):  # an answer without words of the text
            assert all(reader._copied is reader.choice.numbers is readers[0].choice.numbers for reader in readers)
            assert {0, 4, 5} <= {*readers[0].choice.numbers[0].tolist()}
            model(torch.tensor([[96]]), cache=cache)


def test_single_tokens_are_planned_and_see_what_many_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two choices a step attends to the copies and to all entries after the blocks: as the same tokens do in
    one pass that keeps the choice."""
    model, ids = tiny("llama"), _ids(230)
    cache, last = KeepCache(model, SPEC, 24, chunk=16, where="host"), ids[:, -20:]
    reader = cache.layers[0].reader
    with torch.no_grad():
        model(ids[:, :-20], cache=cache)
        twin = cache.fork()
        planned, found = [], []
        for token in last.split(1, 1):
            found.append(model(token, cache=cache).logits)
            planned.append(cache.layers[0].plan() is not None)
        choice, numbers = twin.layers[0].reader.choice, reader.choice.numbers
        monkeypatch.setattr(choice, "choose", lambda blocks, new, choose=choice.choose: choose(blocks, 1))
        wanted = model(last, cache=twin).logits
    assert all(planned) and reader.choice.numbers is numbers
    assert torch.allclose(torch.cat(found, 1), wanted, atol=1e-3)


def test_a_text_longer_than_the_positions_stays_within_the_budget() -> None:
    model, ids = tiny("llama"), _ids(700)
    cache, held = KeepCache(model, SPEC, 32, chunk=32, where="host"), set()
    with torch.no_grad():
        for part in ids.split(50, 1):
            assert model(part, cache=cache).logits.isfinite().all()
            states = cache.entry_states()
            assert all(int((layer == 1).sum(-1).max()) <= 32 for layer in states)
            held.add(cache.resident_bytes())
    assert len(held) == 1
    assert cache.exactness == Exactness.REVERSIBLE and "exact up to 64 tokens" in cache.describe()[0].note


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_the_planner_counts_the_copies(family: str) -> None:
    model, ids = tiny(family), _ids(450)
    cache = KeepCache(model, SPEC, 24, chunk=16, where="host")
    granted = [peak_bytes(cache, length) for length in (60, 449, 450)]
    with torch.no_grad():
        for part, most in zip(ids.split([60, 389, 1], 1), granted, strict=True):
            model(part, cache=cache)
            assert cache.memory().bytes <= most
    layers = cache.geometry.full_layers
    held = sum(cache.layers[layer.index].reader.bookkeeping_bytes for layer in layers)
    assert 0 < held == sum(cache.method.recall.holds(layer, cache.geometry, 450, 426).bookkeeping for layer in layers)


def test_crop_and_fork_choose_again() -> None:
    model, ids = tiny("llama"), _ids(200)
    cache = KeepCache(model, SPEC, 24, chunk=16, where="host")
    with torch.no_grad():
        model(ids, cache=cache)
        copy = cache.fork()
        wanted = model(ids[:, :1], cache=cache).logits
        assert torch.allclose(model(ids[:, :1], cache=copy).logits, wanted, atol=1e-4)
        cache.crop(-1)
        assert torch.allclose(model(ids[:, :1], cache=cache).logits, wanted, atol=1e-3)


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
    for spec in ("endless+blocks:size=100", "endless+blocks:0"):
        with pytest.raises(UsageError):
            resolve(spec)
    with pytest.raises(BudgetError, match="need"):
        KeepCache(tiny("llama"), "endless", 64)
    with pytest.raises(UsageError, match="capacity"):
        KeepCache(tiny("llama"), SPEC, 24, capacity=100)
    model, mask = tiny("llama"), torch.ones(2, 100, dtype=torch.long)
    mask[0, :9] = 0
    with pytest.raises(UsageError, match="padding"):
        model(_ids(100, rows=2), attention_mask=mask, cache=KeepCache(model, SPEC, 24, chunk=16))
