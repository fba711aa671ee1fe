"""The checks hold on honest models, and can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import tokenizer
from families import tiny

from kvkeep.lab import verify as checks
from kvkeep.models.adapter import Adapter
from kvkeep.stores import checkpoints


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_all_claims_hold(family: str) -> None:
    report = checks.verify(tiny(family), tokenizer(), family, quick=True)
    assert report.holds, report
    assert {row.kind for row in report.memory} == {"kv", "residual", "tokens"}
    assert len(report.patching) == 4


@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_bits_are_equal_in_every_dtype(dtype: torch.dtype) -> None:
    ids = torch.arange(2, 66).unsqueeze(0)
    rows = list(checks.reconstruction(tiny("gemma3"), ids, (16, 64), dtype))
    assert [row.kind for row in rows] == ["full", "sliding"] * 2
    assert all(row.holds for row in rows)


def test_the_papers_recompute_without_a_window_differs_and_ours_does_not() -> None:
    """KV-Direct, section 5.4: recomputing Gemma 3's sliding layers without their window breaks it."""
    ids = torch.randint(2, 97, (1, 400), generator=torch.Generator().manual_seed(0))
    found = checks.beyond_the_window(tiny("gemma3"), ids)
    assert found.holds and found.matching == found.of
    assert found.matching_without_window < found.of


def test_wrong_keys_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Adapter.project

    def off(self: Any, *arguments: Any) -> Any:
        keys, values = honest(self, *arguments)
        return keys + 1e-4, values

    monkeypatch.setattr(Adapter, "project", off)
    rows = list(checks.reconstruction(tiny("llama"), torch.arange(2, 30).unsqueeze(0), (16,), torch.float32))
    assert not any(row.holds for row in rows)


def test_a_forgotten_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recompute as the paper does it, in our own machinery: the check must see it."""
    honest = checkpoints._Scratch.__init__
    monkeypatch.setattr(
        checkpoints._Scratch, "__init__", lambda self, slots, visible, window: honest(self, slots, visible, None)
    )
    ids = torch.randint(2, 97, (1, 400), generator=torch.Generator().manual_seed(0))
    assert not checks.beyond_the_window(tiny("gemma3"), ids, new=24).holds


def test_a_byte_too_many_is_found() -> None:
    ids = (torch.arange(200) % 90 + 2).unsqueeze(0)
    rows = list(checks.account(tiny("llama"), ids, kinds=("kv",)))
    assert all(row.holds for row in rows)
    off = checks.Bytes(**{**vars(rows[0]), "used": rows[0].used + 1})
    assert not off.holds


def test_a_layer_that_looks_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the residual did not determine what follows, patching would show it."""
    model = tiny("llama")
    seen: list[torch.Tensor] = []

    def leak(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output)
        return output + 0.01 * len(seen)

    handle = model.model.norm.register_forward_hook(leak)
    try:
        assert not all(row.holds for row in checks.patching(model, tokenizer()))
    finally:
        handle.remove()


@pytest.mark.real
@pytest.mark.slow
def test_smollm2() -> None:
    import kvkeep

    loaded = kvkeep.load("smollm2")
    assert checks.verify(loaded.model, loaded.tokenizer, loaded.name, quick=True).holds
