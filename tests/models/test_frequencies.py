"""Models whose rotary frequencies change at some length: exact before it, and lossy after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import saved
from families import COMMON, VOCABULARY, tiny
from kvkeep_lab.bits import PADDING, greatest_difference, one_at_a_time

from kvkeep import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.geometry import ModelGeometry
from kvkeep.models.loading import load

LENGTH = 64
"""At which frequencies change."""
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-longrope": lambda: hf.LlamaConfig(
        **COMMON, rope_parameters=_LONG | {"factor": 8.0, "original_max_position_embeddings": LENGTH}
    ),
    "llama-dynamic": lambda: hf.LlamaConfig(
        **COMMON | {"max_position_embeddings": LENGTH + 1},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
    "phi3-longrope": lambda: hf.Phi3Config(
        **COMMON, original_max_position_embeddings=LENGTH, rope_parameters=dict(_LONG)
    ),
}
TEXT = torch.randint(2, VOCABULARY, (1, 2 * LENGTH), generator=torch.Generator().manual_seed(3))


def made(name: str) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def answer(model: Any, cache: Any, prompt: int, tokens: int) -> list[int]:
    ids = TEXT[:, :prompt]
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out: list[int] = model.generate(ids, cache=cache, max_new_tokens=tokens, **given)[0].tolist()
    return out[prompt:]


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("spec", ["full", "kv-direct", "h2o+checkpoint"])
def test_a_cache_is_exact_until_frequencies_change_and_lossy_beyond(name: str, spec: str) -> None:
    model = made(name)
    cache = KeepCache(model, spec, budget=None if spec == "full" else 24)
    assert answer(model, cache, 40, LENGTH - 39) == answer(model, None, 40, LENGTH - 39)
    assert cache.get_seq_length() == LENGTH and cache.exactness is Exactness.EXACT
    first = cache.describe()[0]
    assert first.exactness == "exact" and f"lossy beyond {LENGTH} tokens" in first.note
    with torch.no_grad():
        model(TEXT[:, LENGTH : LENGTH + 1], cache=cache)
    assert cache.exactness is Exactness.LOSSY and cache.describe()[0].exactness == "lossy"


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prompt", [40, 2 * LENGTH - 20])
def test_generate_keeps_the_cache_when_frequencies_change(name: str, prompt: int) -> None:
    """Phi-3's own code would drop the cache and read the text again without a budget."""
    model = made(name)
    cache = KeepCache(model, "kv-direct", budget=24)
    answer(model, cache, prompt, 2 * LENGTH - prompt)
    assert cache.get_seq_length() == 2 * LENGTH - 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", CONFIGS)
def test_same_bits_are_promised_only_within_a_context_of_constant_frequencies(name: str, tmp_path: Any) -> None:
    model = load(saved(made(name), tmp_path), weights="bfloat16", device="cpu").model

    def cache(context: int | None) -> KeepCache:
        return KeepCache(model, "kv-direct", budget=24, context=context)

    assert not any(one.same_bits for length in (None, LENGTH + 1) for one in cache(length).describe())
    within = cache(LENGTH).describe()
    assert all(one.same_bits and not one.note for one in within)
    text = TEXT[:, : LENGTH - PADDING]  # beside a row of the whole length
    reference = one_at_a_time(model, text, KeepCache(model, "full"))
    assert greatest_difference(model, text, reference, lambda: cache(LENGTH), seed=1) == (0.0, 0.0)


def test_other_models_have_constant_frequencies() -> None:
    for family in ("llama", "gemma3", "gpt2"):
        assert ModelGeometry.from_config(tiny(family).config).steady_positions is None
