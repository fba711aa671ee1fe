"""Any way of calling a bound model gives the tokens of a model that was never bound."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import tokenizer
from families import FAMILIES, VOCABULARY, tiny
from helpers import assert_near, forward, stock

from kvkeep import KeepCache, UnsupportedModelError, UsageError
from kvkeep.models.binding import bind
from kvkeep.models.same_text import PREPARE

IDS = torch.randint(2, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
Way = Callable[[Any, Any], list[int]]


def _generated(tokens: Any = IDS, **options: Any) -> Way:
    return lambda model, cache: model.generate(tokens, cache=cache, **GREEDY | options)[0, 40:].tolist()


def _vectors(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model.get_input_embeddings()(ids).detach()


def _from_vectors(**options: Any) -> Way:
    """transformers then returns only the new tokens."""
    return lambda model, cache: model.generate(inputs_embeds=_vectors(model), cache=cache, **GREEDY | options)[
        0
    ].tolist()


def _stepped(begin: Callable[[Any, Any], Any], **options: Any) -> Way:
    """A pass over the prompt, and then over each token."""

    def run(model: Any, cache: Any) -> list[int]:
        output, found = begin(model, cache), []
        for _ in range(6):
            found.append(int(output[0][0, -1].argmax()))
            output = model(torch.tensor([found[-1:]]), cache=cache, **options)
        return found

    return run


def _in_order(model: Any, cache: Any) -> list[Any]:
    """The arguments of a pass up to the cache, by their places."""
    names = [*inspect.signature(model.forward).parameters]
    return [{"input_ids": IDS, "cache": cache}.get(name) for name in names[: names.index("cache") + 1]]


def _again(call: Callable[[Any, Any, torch.Tensor], Any]) -> Way:
    """A pass over the whole text for each token."""

    def run(model: Any, cache: Any) -> list[int]:
        text = IDS
        for _ in range(6):
            cache.reset()
            text = torch.cat([text, call(model, cache, text)[0][:, -1:].argmax(-1)], 1)
        return text[0, 40:].tolist()

    return run


def _with_known(model: Any, cache: Any) -> list[int]:
    model(IDS[:, :25], cache=cache)
    text = model.generate(IDS, cache=cache, do_sample=False, max_new_tokens=3)
    return _generated(text, max_new_tokens=3)(model, cache)


WAYS: dict[str, Way] = {
    "ids": _generated(),
    "vectors": _from_vectors(),
    "ids and vectors": lambda model, cache: _generated(inputs_embeds=_vectors(model))(model, cache),
    "vectors, beams": _from_vectors(num_beams=3),
    "vectors, no cache": lambda model, cache: _from_vectors(use_cache=False)(model, None),
    "no cache": lambda model, cache: model.generate(IDS, use_cache=False, **GREEDY)[0, 40:].tolist(),
    "its own cache": lambda model, cache: model.generate(IDS, **GREEDY)[0, 40:].tolist(),
    "static cache": lambda model, cache: model.generate(IDS, cache_implementation="static", **GREEDY)[0, 40:].tolist(),
    "chunks": _generated(prefill_chunk_size=16),
    "known tokens": _with_known,
    "assisted": lambda model, cache: _generated(assistant_model=tiny("llama"))(model, cache),
    "pass": _stepped(lambda model, cache: model(IDS, cache=cache)),
    "pass over vectors": _stepped(lambda model, cache: model(inputs_embeds=_vectors(model), cache=cache)),
    "pass, positions": _stepped(lambda model, cache: model(IDS, cache=cache, position_ids=torch.arange(40)[None])),
    "pass, in order": _stepped(lambda model, cache: model(*_in_order(model, cache))),
    "pass, tuples": _stepped(lambda model, cache: model(IDS, cache=cache, return_dict=False), return_dict=False),
    "whole text": _again(lambda model, cache, text: model(text, cache=cache)),
    "whole text, no cache": _again(lambda model, cache, text: model(text, use_cache=False)),
    "whole text of vectors": _again(
        lambda model, cache, text: model(inputs_embeds=_vectors(model, text), use_cache=False)
    ),
}  # fmt: skip
CACHES: dict[str, Callable[[Any], Any]] = {
    "stock": stock,
    "full": KeepCache,
    "kv-direct": lambda model: KeepCache(model, "kv-direct", 24, chunk=16),
    "h2o": lambda model: KeepCache(model, "h2o", 200),
}


@pytest.fixture(scope="module", params=["llama", "gemma3", "gemma4", "lfm2", "gpt2"])
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model, and a bound copy."""
    plain = tiny.__wrapped__(request.param)
    bound = copy.deepcopy(plain)
    bind(bound)
    return plain, bound


@pytest.mark.turns(6)
@pytest.mark.parametrize("way", WAYS)
def test_a_bound_model_gives_the_tokens_of_transformers(models: tuple[Any, Any], way: str) -> None:
    plain, bound = models
    with torch.no_grad():
        wanted = WAYS[way](plain, stock(plain))
        assert len(wanted) in (3, 6)
        for name, made in CACHES.items():
            assert WAYS[way](bound, made(bound)) == wanted, name


def test_a_copy_of_a_bound_model_is_called_as_the_model_is(models: tuple[Any, Any], tmp_path: Path) -> None:
    """Copied, pickled and saved."""
    plain, bound = models
    file = io.BytesIO()
    torch.save(bound, file)
    file.seek(0)
    bound.save_pretrained(tmp_path)
    read = type(plain).from_pretrained(tmp_path)
    wanted = inspect.signature(getattr(plain, PREPARE))
    for one in (copy.deepcopy(bound), torch.load(file, weights_only=False), read):
        prepare = getattr(one, PREPARE)
        assert inspect.signature(prepare) == wanted
        assert getattr(prepare, "args", (one,))[0] is one
        assert WAYS["vectors"](one, stock(one)) == WAYS["vectors"](plain, stock(plain))


def test_a_pipeline_writes_what_it_writes_with_a_model_that_is_not_bound(models: tuple[Any, Any]) -> None:
    texts = [
        transformers.pipeline("text-generation", model=model, tokenizer=tokenizer())("the of and", **GREEDY)
        for model in models
    ]
    assert texts[0] == texts[1]


def test_vectors_of_a_part_of_the_text_are_refused(models: tuple[Any, Any]) -> None:
    """transformers takes those of all of it."""
    model = models[1]
    cache, vectors = KeepCache(model, "h2o", 24), _vectors(model)
    forward(model, cache, vectors[:, :25])
    with pytest.raises(UsageError, match="already holds 25 tokens, and this text has 15"):
        model.generate(inputs_embeds=vectors[:, 25:], cache=cache, **GREEDY)


def test_several_last_logits_of_layers_that_share_keys(models: tuple[Any, Any]) -> None:
    """Such layers leave out the other queries, where transformers knows the attention by its name."""
    plain, bound = models
    wanted = forward(plain, stock(plain), IDS).logits[:, -5:]
    for made in CACHES.values():
        assert_near(forward(bound, made(bound), IDS, logits_to_keep=5).logits, wanted)


def test_code_that_compares_the_name_of_its_attention_is_not_bound() -> None:
    config = transformers.DeepseekV32Config(
        **FAMILIES["deepseek_v3"]().to_diff_dict() | {"model_type": "deepseek_v32", "architectures": None},
        index_topk=8, index_n_heads=2, index_head_dim=16,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="'deepseek_v32' runs other code when its attention is not called"):
        bind(model)
    assert model.config._attn_implementation == "sdpa"
    assert WAYS["ids"](model, KeepCache(model)) == WAYS["ids"](model, stock(model))
