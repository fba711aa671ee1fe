"""Effective ranks are those of the matrix itself, and truncation to all of a head changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from families import VOCABULARY, tiny
from kvkeep_lab.studies.effective_rank import EffectiveRank, Ranks, layer_ranks, product_singular_values
from kvkeep_lab.studies.truncation import WAYS, Truncation, truncated, truncations
from measuring import quiet

from kvkeep.errors import UsageError
from kvkeep.models.head_weights import head_weights

PROMPT = torch.randint(0, VOCABULARY, (60,), generator=torch.Generator().manual_seed(8)).tolist()


@pytest.mark.parametrize("shape", [(20, 20), (12, 30)])
def test_singular_values_of_a_product(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(2, rows, 6, generator=generator) for rows in shape)
    b[1, :, 4:] = 0  # a product of rank 4
    got = product_singular_values(a, b)
    for mine, left, right in zip(got, a, b, strict=True):
        expected = numpy.linalg.svd((left @ right.T).double().numpy(), compute_uv=False)[:6]
        assert numpy.allclose(mine.numpy(), expected, atol=1e-4)
    assert got[1, 4:].max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "gpt2", "gemma4"])
def test_ranks_are_the_papers_definition(family: str) -> None:
    found = layer_ranks(tiny(family))
    weights = head_weights(tiny(family))
    assert [layer.layer for layer in found] == [0, 1, 2, 3]
    assert (found[0].turned is None) == (family in ("gpt2", "gemma4"))  # learned positions; rotates otherwise
    for layer, mine in zip(found, weights, strict=True):
        keys = mine.key if mine.key is not None else weights[layer.layer - 2].key
        assert keys is not None and len(layer.heads) == 4 and len(layer.groups) == len(keys)
        for head, got in enumerate(layer.heads):
            product = mine.query[head].T @ keys[head * len(keys) // 4]
            energy = numpy.cumsum(numpy.linalg.svd(product.numpy(), compute_uv=False) ** 2)
            assert got == 1 + int((energy < 0.9 * energy[-1]).sum())
        assert max(layer.fourth) <= max(layer.heads) and layer.fourth_energy[0] >= layer.energy[0]
        assert layer.energy[-1] == pytest.approx(1) and layer.energy == sorted(layer.energy)


def test_a_group_s_rank_is_of_all_that_asks() -> None:
    model = tiny("llama")
    weights = head_weights(model)[1]
    assert weights.key is not None
    stacked = torch.cat([weights.query[head].T @ weights.key[0] for head in (0, 1)])
    energy = numpy.cumsum(numpy.linalg.svd(stacked.numpy(), compute_uv=False) ** 2)
    assert layer_ranks(model)[1].groups[0] == 1 + int((energy < 0.9 * energy[-1]).sum())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@torch.no_grad()
def test_truncation_to_everything_changes_nothing(family: str) -> None:
    model, ids = tiny(family), torch.tensor([PROMPT])
    before = model(ids, use_cache=False).logits
    with truncated(model, head_weights(model)[0].query.shape[1]):
        assert torch.allclose(model(ids, use_cache=False).logits, before, atol=1e-3)
    with truncated(model, 1):
        assert not torch.allclose(model(ids, use_cache=False).logits, before, atol=1e-1)
    assert torch.equal(model(ids, use_cache=False).logits, before)  # the hooks are gone


def truncate(family: str, ranks: list[int], new: int) -> list[Truncation]:
    return truncations(tiny(family), PROMPT, ranks, new=new, progress=quiet)


def test_tokens_and_divergence_by_rank() -> None:
    by = {(row.way, row.rank): row for row in truncate("llama", [2, 8], 6)}
    assert list(by) == [(way, rank) for way in WAYS for rank in (2, 8)]
    for way in WAYS:
        small, whole = by[way, 2], by[way, 8]
        assert whole.match == 1 and whole.top1 == 1 and whole.kl is not None and whole.kl < 1e-6
        assert small.kl is not None and small.kl > 100 * whole.kl
    assert len({by[way, 2].kl for way in WAYS}) == len(WAYS)
    for wrong in (0, 9):
        with pytest.raises(UsageError, match="from 1"):
            truncate("llama", [wrong], 4)


def test_what_cannot_be_truncated_says_so() -> None:
    for family, count in (("phi3", 5), ("gemma3", 1)):
        errors = [row for row in truncate(family, [4], 3) if row.error]
        assert len(errors) == count and all(family in row.error for row in errors)


def test_a_figure_without_a_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = Ranks(layer_ranks(tiny("llama")))
    EffectiveRank().draw(found, tmp_path / "rank.png", title="tiny")
    assert (tmp_path / "rank.png").stat().st_size > 5_000
    assert max(found.values("heads")) <= 8 and found.energy(8) == pytest.approx(1)
