"""Numbers that ``generate`` takes, and texts at the end of a model's positions."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import transformers
from conftest import tokenizer
from families import COMMON, tiny
from helpers import forward, prompt, stock

from kvkeep import Conversation, KeepCache, UsageError, generate
from kvkeep.geometry import ModelGeometry

WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"max_new_tokens": value}, "'max_new_tokens' is a whole number of at least 1, not") for value in (0, -1, 2.5)),
    *(({"max_new_tokens": value}, "'max_new_tokens' is a whole number") for value in (True, None, "3", float("nan"))),
    *(({"seed": value}, "A seed is a whole number") for value in (2.5, "1", 2**64, -(2**63) - 1)),
    *(({"temperature": value}, "A temperature is a number") for value in ("1", None, -1)),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG)
def test_numbers_that_are_none_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    """Before anything is read: a conversation is as before."""
    model = tiny("llama")
    cache = KeepCache(model)
    with pytest.raises(UsageError, match=sentence):
        generate(model, None, [5, 6, 7], cache, **options)
    assert cache.get_seq_length() == 0
    talk = Conversation(model, tokenizer(), cache)
    with pytest.raises(UsageError, match=sentence):
        talk.answer("the of", **options)
    assert not talk.messages


def test_the_ends_of_the_ranges() -> None:
    model = tiny("llama")
    for options in ({"seed": 2**64 - 1}, {"seed": -(2**63)}, {"temperature": 1e30}):
        count = numpy.int64(2)
        assert len(generate(model, None, [5, 6, 7], KeepCache(model), max_new_tokens=count, **options).tokens) == 2


@pytest.mark.parametrize("token", [97, -1, 2**40])
def test_a_token_that_the_model_does_not_have(token: int) -> None:
    model = tiny("llama")
    with pytest.raises(UsageError, match=f"contains the token id {token}, but the model's ids are 0 to 96"):
        generate(model, None, [5, token, 7], KeepCache(model))


@pytest.mark.parametrize("method", ["full", "static", "kv-direct", "window", "h2o", "snapkv+verified"])
def test_a_text_ends_with_the_models_positions(method: str) -> None:
    """In transformers' loop, too, and in a pass: beyond them a model writes what nobody has measured."""
    model, ids = tiny("llama"), prompt(1, 510)
    cache = KeepCache(model, method, None if method == "full" else 600 if method == "static" else 64)
    with pytest.raises(UsageError, match="513 tokens exceed the model's 512 positions; use method 'endless'"):
        model.generate(ids, cache=cache, do_sample=False, max_new_tokens=9)
    cache.reset()
    with pytest.raises(UsageError, match="600 tokens exceed the model's 512 positions"):
        forward(model, cache, prompt(1, 600))
    with pytest.raises(
        UsageError, match=r"600 tokens, but .* 512 positions; continue .* KeepCache\(model, 'endless', 1024\)"
    ):
        generate(model, None, [5] * 600, cache)
    assert cache.get_seq_length() == 0
    assert len(generate(model, None, ids[0].tolist(), cache, max_new_tokens=9).tokens) == 2


@pytest.mark.parametrize("method", ["endless+passages:count=2,size=16", "streaming-llm"])
def test_methods_for_texts_of_any_length_go_on(method: str) -> None:
    model = tiny("llama")
    assert len(generate(model, None, [5] * 600, KeepCache(model, method, 64, chunk=16), max_new_tokens=3).tokens) == 3


@pytest.mark.parametrize(
    ("kind", "stated", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 512, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048, 2048),
        ({"rope_type": "dynamic", "factor": 2.0}, 512, 1024),
        ({"rope_type": "linear", "factor": 8.0}, 512, 512),  # Gemma 3 states the positions after scaling
        ({"rope_type": "default"}, 512, 512),
    ],
)
def test_positions_of_scaled_frequencies(kind: dict[str, Any], stated: int, positions: int) -> None:
    rope = {"rope_parameters": {"rope_theta": 1e4, **kind}}
    config = transformers.LlamaConfig(**COMMON | {"max_position_embeddings": stated} | rope)
    assert ModelGeometry.from_config(config).max_positions == positions
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    length = min(positions, 600)
    result = generate(model, None, [5] * (length - 2), KeepCache(model), max_new_tokens=9)
    plain = generate(model, None, [5] * (length - 2), stock(model), max_new_tokens=len(result.tokens))
    assert result.tokens == plain.tokens and len(result.tokens) == (9 if positions > 600 else 2)
