"""Scores measured on a model: Fisher information of layers, retrieval of heads, and the budgets they give."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from families import tiny
from helpers import prompt, step
from kvkeep_lab.published import retrieval_heads as heads
from kvkeep_lab.published.fisher import information
from transformers import AutoModelForCausalLM

from kvkeep import KeepCache, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.blocks import quantised
from kvkeep.models.packed import PackedLinear

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
    packed = deepcopy(tiny(family))
    projection = packed.model.layers[geometry(family).full_layers[0].index].self_attn
    projection.v_proj = PackedLinear(quantised(projection.v_proj.weight.detach(), 8))
    dense = deepcopy(packed)
    plain = dense.model.layers[geometry(family).full_layers[0].index].self_attn
    plain.v_proj = torch.nn.Linear(*projection.v_proj.weight.shape[::-1], bias=False)
    plain.v_proj.weight.data = projection.v_proj.dense()
    found, expected = (information(one, geometry(family), IDS) for one in (packed, dense))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-9)  # its products are in bfloat16
    assert [weight.requires_grad for weight in model.parameters()] == flags


def test_without_a_text_information_is_measured_on_generated_text() -> None:
    one = information(deepcopy(tiny("llama")), geometry("llama"))
    frozen = deepcopy(tiny("llama")).requires_grad_(False)
    with torch.inference_mode():
        other = information(frozen, geometry("llama"))
    assert torch.equal(one, other) and (one > 0).all()


def test_layers_share_the_budget_by_information(tmp_path: Path) -> None:
    scores = tmp_path / "scores.txt"
    scores.write_text("8\n4\n3\n1\n")
    cache = KeepCache(tiny("llama"), f"h2o-fisher:least=0.2,scores={scores}", 100)
    assert [budget_of for (budget_of,) in cache.budgets or ()] == [180, 100, 80, 40]
    cache = KeepCache(tiny("llama"), f"h2o-fisher:scores={scores}+sketch:0.2,swap=1.1", 100, chunk=20)
    step("llama", cache, prompt(1, 200))
    memory = cache.memory()
    assert memory.resident_bytes + memory.compressed_bytes <= 100 * cache.geometry.kv_bytes_per_token


def test_scores_are_the_attention_paid_to_the_passkey() -> None:
    """Against attention weights of transformers' eager attention."""
    model = tiny("llama")
    scores = heads.retrieval_scores(model, geometry("llama"))
    assert scores.shape == (4, 2) and bool((scores >= 0).all()) and bool((scores <= 1).all())
    seen: list[torch.Tensor] = []
    honest = heads.decoder_of
    shown = lambda model: lambda **given: seen.append(given["input_ids"]) or honest(model)(**given)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "decoder_of", shown)
        assert torch.equal(heads._measured(model, geometry("llama")), scores)
    ids, passkey = seen[0], heads.PASSKEY
    eager = AutoModelForCausalLM.from_config(deepcopy(model.config), attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        weights = eager(ids, output_attentions=True).attentions
    for layer in range(4):
        paid = torch.zeros(4)
        for row in range(len(ids)):
            key = ids[row, -passkey:].tolist()
            place = next(p for p in range(len(ids[row])) if ids[row, p : p + passkey].tolist() == key)
            for number in range(passkey - 1):
                paid += weights[layer][row, :, ids.shape[1] - passkey + number, place + number + 1]
        expected = (paid / (len(ids) * (passkey - 1))).view(2, 2).amax(1)
        torch.testing.assert_close(scores[layer], expected, atol=1e-5, rtol=1e-3)


def test_budgets_of_heads_follow_the_score_file(tmp_path: Path) -> None:
    (tmp_path / "heads.tsv").write_text("0.9\t0.1\n0.2\t0.8\n0.3\t0.1\n0.7\t0.2\n")
    cache = KeepCache(tiny("llama"), f"duo-attention:retrieval=0.375,scores={tmp_path / 'heads.tsv'}", 40)
    assert cache.budgets is not None
    few, many = 10, (40 * 8 - 5 * 10) // 3
    assert [list(layer) for layer in cache.budgets] == [[many, few], [few, many], [few, few], [many, few]]
    assert cache.describe()[0].note == f"by head: {many}, {few}"
    step("llama", cache, prompt(1, 120))
    entries = sum(layer.resident.resident_slots().sum().item() for layer in cache.layers)
    assert entries == sum(map(sum, cache.budgets)) <= 40 * 8
    assert cache.memory().resident_bytes == entries * 2 * 8 * 4  # 8 float32 each: nothing is masked away


@pytest.mark.parametrize(
    ("method", "content", "says"),
    [
        *(("h2o-fisher", text, r"scores\.txt") for text in ("1 2 3", "1\n2\nx\n4", "0\n0\n0\n0", "1\n2\n-3\n4")),
        ("duo-attention", "0.1 0.2\n", "scores for 1 layers of 2 heads"),
        *(
            (name, "secret word\n", r"scores\.txt': it is not a table of numbers\.$")
            for name in ("duo-attention", "h2o-fisher")
        ),
        *((name, None, r"scores\.txt': no such file or directory\.$") for name in ("duo-attention", "h2o-fisher")),
    ],
)
def test_an_unsuitable_score_file_is_refused(tmp_path: Path, method: str, content: str | None, says: str) -> None:
    path = tmp_path / "scores.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=says):
        KeepCache(tiny("llama"), f"{method}:scores={path}", 100)
