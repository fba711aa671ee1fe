"""The main job on the embedded model: real text, a small hard budget, token for token the unbounded cache's answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvkeep_lab.prompts import TEXT

from kvkeep import KeepCache, generate, load
from kvkeep.stock import new_cache

pytestmark = pytest.mark.real
NEW, HALF = 8, TEXT.index(". ", len(TEXT) // 2) + 1


@pytest.fixture(scope="module")
def ids(smollm2: Any) -> list[int]:
    from kvkeep.decode.prompt import encode, question

    return encode(smollm2.tokenizer, question(TEXT[:HALF], "What does the librarian do?"))


@pytest.fixture(scope="module")
def expected(smollm2: Any, ids: list[int]) -> Any:
    cache = new_cache(smollm2.model, "stock")
    return generate(smollm2.model, smollm2.tokenizer, ids, cache, max_new_tokens=NEW)


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "options",
    [
        {"budget": "1MB", "checkpoint": "kv", "where": "disk"},
        {"budget": "12.5%", "checkpoint": "residual:5", "where": "host"},
        {"budget": 64, "checkpoint": "tokens", "where": "device"},
        {"budget": 0, "checkpoint": "residual", "where": "disk"},
    ],
)
def test_token_for_token(smollm2: Any, ids: list[int], expected: Any, options: dict[str, Any]) -> None:
    assert len(ids) > 120
    new = 4 if options.get("checkpoint") in ("tokens", "residual:5") else NEW
    cache = KeepCache(smollm2.model, "kv-direct", context=len(ids) + new, **options)
    result = generate(smollm2.model, smollm2.tokenizer, ids, cache, max_new_tokens=new)
    assert result.tokens == expected.tokens[:new]
    assert cache.entries is not None
    assert result.memory.resident_bytes <= cache.entries * cache.geometry.kv_bytes_per_token
    assert expected.memory.resident_bytes > 4 * result.memory.resident_bytes or options["budget"] == 64


@pytest.mark.slow
def test_kvzip_finds_what_nobody_had_asked_for_yet(smollm2: Any) -> None:
    """A context is read and compressed by itself; the question comes when three quarters of it are gone."""
    from kvkeep.decode.prompt import encode, question

    text = f"{TEXT[:HALF]} The special magic number for Oslo is 48213.{TEXT[HALF:]}"
    asked = encode(smollm2.tokenizer, question(text, "What is the special magic number for Oslo?"))
    alone = smollm2.tokenizer(text, add_special_tokens=False).input_ids
    context = asked[: len(alone)]  # the question begins behind it
    cache = KeepCache(smollm2.model, "kvzip", len(context) // 4, where="host")
    with torch.no_grad():
        smollm2.model(torch.tensor([context]), cache=cache, logits_to_keep=1)
    room = cache.entries * cache.geometry.kv_bytes_per_token
    assert not cache.reading and cache.memory().resident_bytes <= room
    assert not any(cache.memory().checkpoint_bytes.values())
    answer = generate(smollm2.model, smollm2.tokenizer, asked, cache, max_new_tokens=16)
    assert "48213" in answer.text and answer.memory.resident_bytes <= room
    assert answer.timing.reconstruction_s == 0  # that was before


@pytest.mark.slow
def test_half_precision_agrees_up_to_ties(ids: list[int]) -> None:
    """In bfloat16 sums in another order may decide a near tie otherwise: a token may differ only where the stock
    model's own two best logits are closer than bfloat16 resolves."""
    model, text = load("smollm2", weights="bfloat16").model, torch.tensor([ids])
    cache, options = KeepCache(model, budget=64, checkpoint="residual", where="host"), {"max_new_tokens": NEW}
    stock = model.generate(text, do_sample=False, return_dict_in_generate=True, output_logits=True, **options)
    ours = model.generate(text, do_sample=False, cache=cache, **options)
    for step, logits in enumerate(stock.logits):
        if int(stock.sequences[0, len(ids) + step]) != int(ours[0, len(ids) + step]):
            best = logits[0].float().topk(2).values
            assert float(best[0] - best[1]) <= 0.25, f"token {step} differs without a tie: margin {best[0] - best[1]}"
            break
