"""Layers that share blocks: a pass reads the blocks where they lie, and gives what one tensor gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tokenizer
from families import tiny

from kvkeep import KeepCache, transfer
from kvkeep.memory.shared_rows import SharedRows
from kvkeep.models.loading import load

READ, NEW = 520, 7
"""Tokens of two blocks and some more, and of the next pass."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny("llama", positions=2048).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return load(folder, weights="bfloat16", device="cpu").model


def ids(rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 60, (rows, READ + NEW), generator=torch.Generator().manual_seed(rows))


@torch.inference_mode()
def pair(model: torch.nn.Module, text: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[KeepCache, KeepCache]:
    """Return two caches that have read the same text; the second shares the blocks of a third."""
    caches = KeepCache(model, "full"), KeepCache(model, "full")
    for cache in caches:
        model(text[:, :READ], cache=cache, attention_mask=None if mask is None else mask[:, :READ])
    return caches[0], transfer.begun(caches[1], READ)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rows", [1, 2])
@torch.inference_mode()
def test_a_pass_copies_no_shared_block(model: torch.nn.Module, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text, mask = ids(rows), None
    if rows > 1:
        mask = torch.ones_like(text)
        mask[1, :5] = 0
    own, shared = pair(model, text, mask)
    assert all(layer.shared for layer in shared.layers)
    expected = model(text[:, READ:], cache=own, attention_mask=mask).logits
    with monkeypatch.context() as context:
        context.delattr(SharedRows, "view")
        found = model(text[:, READ:], cache=shared, attention_mask=mask).logits
    assert torch.equal(found, expected)
    assert torch.equal(shared.layers[0].keys, own.layers[0].keys)


@pytest.mark.usefixtures("kernels")
@torch.inference_mode()
def test_neither_growing_nor_sharing_moves_a_full_piece(model: torch.nn.Module) -> None:
    cache, text = KeepCache(model, "full"), ids().repeat(1, 3)
    places: set[int] = set()
    for stop in (1, 513, 514, 1060):
        model(text[:, cache.get_seq_length() : stop], cache=cache)
        before, places = places, {piece.data_ptr() for piece in cache.layers[0].shared}
        assert before <= places
    begun = transfer.begun(cache, 1060)
    assert len(places) == 4
    assert all({piece.data_ptr() for piece in one.layers[0].shared} == places for one in (cache, begun))


@pytest.mark.usefixtures("kernels")
@torch.inference_mode()
def test_plain_attention_to_pieces_sees_all_entries(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it attends where queries are of a type that the kernel does not read."""
    caches = pair(model, text := ids())
    expected = model(text[:, READ:], cache=caches[0]).logits
    monkeypatch.setattr("kvkeep.step.native.attend_all", lambda *given: None)
    found = model(text[:, READ:], cache=caches[1]).logits
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


@pytest.mark.usefixtures("kernels")
@torch.inference_mode()
def test_a_mask_of_the_callers_own_sees_all_entries(model: torch.nn.Module) -> None:
    text = ids()
    own, shared = pair(model, text)
    seen = torch.ones(READ + NEW, READ + NEW, dtype=torch.bool).tril()[None, None, READ:].clone()
    seen[..., 1:9] = False
    found, expected = (model(text[:, READ:], cache=cache, attention_mask=seen).logits for cache in (shared, own))
    assert torch.equal(found, expected)
    assert not torch.equal(found, model(text[:, READ:], cache=pair(model, text)[0]).logits)


@pytest.mark.usefixtures("kernels")
@torch.inference_mode()
def test_caches_share_blocks_of_a_checkpoint_on_disk(model: torch.nn.Module) -> None:
    text = ids()
    kind: dict[str, Any] = {"method": "kv-direct", "budget": 16, "checkpoint": "kv"}
    caches = [KeepCache(model, **kind, where="disk") for _ in range(2)]
    for cache in caches:
        model(text[:, :READ], cache=cache)
    whole, given = caches
    assert transfer.lends(given) and not transfer.lends(KeepCache(model, **kind, where="host"))
    for length in (READ, 514, 300):  # within the resident entries, and within evicted ones
        begun = transfer.begun(given, length)
        stores = zip(begun.checkpoint_rows(), given.checkpoint_rows(), strict=True)
        assert all(mine.pages[0].data_ptr() == lent.pages[0].data_ptr() for (_, mine), (_, lent) in stores)
        whole.crop(length - whole.get_seq_length())
        for new in (text[:, length : length + NEW], text[:, :1]):
            assert torch.equal(model(new, cache=begun).logits, model(new, cache=whole).logits)
        begun.crop(100 - begun.get_seq_length())  # what it writes then is its own
        model(text[:, 100:READ].flip(1), cache=begun)
    expected = KeepCache(model, **kind, where="host")
    model(text[:, :READ], cache=expected)
    assert torch.equal(model(text[:, READ:], cache=given).logits, model(text[:, READ:], cache=expected).logits)
