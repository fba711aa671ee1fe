"""Recorded attention is what the model computed, and head weights reproduce its inputs in every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny
from kvkeep_lab.attention_inputs import Attended, grouped, watching
from kvkeep_lab.head_weights import head_weights, inputs
from transformers import AutoModelForCausalLM, GPTNeoXConfig, OPTConfig

from kvkeep.errors import UnsupportedModelError
from kvkeep.models.binding import bind

WITHOUT = ("deepseek_v3", "qwen3_next", "lfm2", "bamba")
PLAIN = [family for family in FAMILIES if family not in (*WITHOUT, "gpt_oss")]
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


CONFIGS: dict[str, Any] = {
    **FAMILIES,
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES, intermediate_size=48),  # fused head by head
    "opt": lambda: OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
}


def without_biases(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    return model


@pytest.mark.parametrize("family", [*PLAIN, "gpt_neox", "opt"])
@torch.no_grad()
def test_head_weights_times_input_equal_the_inputs_of_attention(family: str) -> None:
    """Except for rotation, which keeps lengths, and norms, which keep the directions of values."""
    model = without_biases(family)
    weights = head_weights(model)
    shown: list[tuple[torch.Tensor, Attended]] = []
    ids = torch.randint(0, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(4))
    with inputs(weights) as taken, watching(lambda attended: shown.append((taken.pop(attended.layer), attended))):
        bind(model).decoder(input_ids=ids, use_cache=False)
    assert not taken
    normed = family in ("qwen3", "qwen3_moe", "gemma3", "gemma3n", "gemma4")
    for mine, (x, attended) in zip(weights, shown, strict=True):
        made = {name: torch.einsum("td,hed->hte", x[0], part) for name, part in mine.parts.items()}
        assert set(made) == (
            {"query"} if family in ("gemma3n", "gemma4") and mine.layer > 1 else {"query", "key", "value"}
        )
        if "value" in made:
            assert (torch.cosine_similarity(made["value"], attended.value[0], -1) > 0.9999).all()
        if normed:
            continue
        assert torch.allclose(made["value"], attended.value[0], atol=1e-4)
        for name, handed in (("query", attended.query[0]), ("key", attended.key[0])):
            ratio = handed.norm(dim=-1) / made[name].norm(dim=-1)
            assert torch.allclose(ratio, ratio[0, 0].expand_as(ratio), atol=1e-3)  # OPT scales its queries here
            assert torch.allclose(ratio[0, 0] * made[name][:, 0], handed[:, 0], atol=1e-4)  # nothing is rotated at 0


def test_families_without_head_weights_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="'deepseek_v3' has latent attention"):
        head_weights(tiny("deepseek_v3"))
    for family in WITHOUT[1:]:
        with pytest.raises(UnsupportedModelError, match=f"'{family}' keeps the weights of layer 0 in no module"):
            head_weights(tiny(family))


def test_hooks_are_removed() -> None:
    model = tiny("llama")
    weights = head_weights(model)
    with inputs(weights):
        assert weights[0].module._forward_pre_hooks
    assert not weights[0].module._forward_pre_hooks and not weights[0].module._forward_hooks


def test_attention_with_sinks_is_not_recorded() -> None:
    model = tiny("gpt_oss")
    with pytest.raises(UnsupportedModelError, match="has sinks"), watching(lambda _: None):
        bind(model).decoder(input_ids=torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])
@torch.no_grad()
def test_attention_weights_times_values_equal_the_output(family: str) -> None:
    model = tiny(family)
    decoder = bind(model).decoder
    ids = torch.randint(0, VOCABULARY, (1, 21), generator=torch.Generator().manual_seed(3))
    shown: list[Attended] = []
    with watching(shown.append):
        watched = decoder(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.allclose(watched, decoder(input_ids=ids, use_cache=False).last_hidden_state, atol=1e-5)
    attending = [layer for layer in range(4) if family not in WITHOUT[1:] or layer % 2]
    assert [attended.layer for attended in shown] == attending
    at = torch.tensor([0, 7, 20])
    for attended in shown:
        weights = attended.weights(at)
        assert torch.allclose(weights.sum(-1), torch.ones(()))
        assert not weights.masked_select(~attended.visible(at).expand_as(weights)).any()
        made = weights @ grouped(attended.value, attended.query.shape[1])
        assert torch.allclose(made, attended.output[:, :, at], atol=1e-4)
        assert not weights[:, :, 1, 8:].any()  # nothing ahead
        if family == "gemma3":
            assert bool(weights[:, :, 2, :12].any()) == (attended.layer % 2 == 1)  # windows of 8
