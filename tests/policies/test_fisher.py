"""Fisher information of layers, and the budgets made of it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from families import tiny

from kvkeep import KeepCache, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.fisher import information

IDS = torch.randint(2, 97, (3, 20), generator=torch.Generator().manual_seed(0))


def geometry(family: str) -> ModelGeometry:
    return ModelGeometry.from_config(tiny(family).config)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_information_is_the_squared_gradient_summed_over_texts(family: str) -> None:
    model = deepcopy(tiny(family))
    expected = torch.zeros(len(geometry(family).full_layers), dtype=torch.float64)
    slow = deepcopy(model).requires_grad_(True)
    for row in IDS.split(1):
        slow.zero_grad()
        logits = slow(row, use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum").backward()
        for number, layer in enumerate(geometry(family).full_layers):
            attention = slow.model.layers[layer.index].self_attn
            for weight in (attention.k_proj.weight, attention.v_proj.weight):
                expected[number] += weight.grad.double().square().sum()
    flags = [weight.requires_grad for weight in model.parameters()]
    found = information(model, geometry(family), IDS)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-9)
    assert information(model, geometry(family)) is found  # remembered: nothing is measured again
    assert [weight.requires_grad for weight in model.parameters()] == flags


def test_without_a_text_the_model_writes_its_own() -> None:
    one = information(deepcopy(tiny("llama")), geometry("llama"))
    frozen = deepcopy(tiny("llama")).requires_grad_(False)
    with torch.inference_mode():
        other = information(frozen, geometry("llama"))
    assert torch.equal(one, other) and (one > 0).all()


def test_layers_share_the_budget_by_information(tmp_path: Path) -> None:
    scores = tmp_path / "scores.txt"
    scores.write_text("8\n4\n3\n1\n")
    cache = KeepCache(tiny("llama"), f"h2o-fisher:least=0.2,scores={scores}", 100)
    assert [own for (own,) in cache.budgets or ()] == [180, 100, 80, 40]
    cache = KeepCache(tiny("llama"), f"h2o-fisher:scores={scores}+sketch:0.2,swap=1.1", 100, chunk=20)
    with torch.no_grad():
        tiny("llama")(torch.randint(2, 97, (1, 200)), past_key_values=cache)
    memory = cache.memory()
    assert memory.resident_bytes + memory.compressed_bytes <= 100 * cache.geometry.kv_bytes_per_token


@pytest.mark.parametrize("text", ["1 2 3", "1\n2\nx\n4", "0\n0\n0\n0", "1\n2\n-3\n4"])
def test_a_file_that_does_not_fit_is_refused(text: str, tmp_path: Path) -> None:
    scores = tmp_path / "scores.txt"
    scores.write_text(text)
    with pytest.raises(UsageError, match=r"scores\.txt"):
        KeepCache(tiny("llama"), f"h2o-fisher:scores={scores}", 100)
