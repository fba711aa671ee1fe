"""Positions within the cache: in a model of one layer, where an entry depends on its token alone, StreamingLLM is the
stock model reading the kept tokens afresh."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY
from transformers import AutoModelForCausalLM, DynamicCache

from kvkeep import KeepCache, UnsupportedModelError, UsageError
from kvkeep.errors import BudgetError

BUDGET, SINKS = 20, 3
COPIES = 2  # of the sinks' keys, in entries: the budget counts them
SPEC = f"streaming-llm:sinks={SINKS}"


@cache
def shallow(family: str) -> Any:
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.num_hidden_layers, config.max_position_embeddings = 1, 48
    config.layer_types = ["full_attention"]
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(rows))


@torch.no_grad()
def afresh(model: Any, row: torch.Tensor, new: int) -> torch.Tensor:
    """Logits of the last ``new`` tokens of ``row``: a single one sees B entries with itself, a chunk B before it."""
    before = len(row) - new
    room = BUDGET - 1 if new == 1 else BUDGET
    kept = row[:before] if before <= room else torch.cat([row[:SINKS], row[before - (room - SINKS) : before]])
    ids = torch.cat([kept, row[before:]])[None]
    return model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=new).logits[0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3"])
@pytest.mark.parametrize("first", [1, 2, 9, 28])
def test_equals_reading_what_is_kept(family: str, first: int) -> None:
    """Far past the model's 48 positions, in chunks and single steps, so that positions are moved back several times."""
    model, row = shallow(family), tokens(1, 200)[0]
    cache, done = KeepCache(model, SPEC, BUDGET + COPIES, chunk=BUDGET), 0
    for count in [first, *[1] * 40, 7, 20, *[1] * 50, 13, *[1] * 20]:
        # A chunk longer than the cache's is cut, and its parts see what is kept in between.
        parts = [BUDGET] * (count // BUDGET) + [count % BUDGET] * (count % BUDGET > 0)
        ids = row[None, done : done + count]
        with torch.no_grad():
            ours = model(ids, past_key_values=cache, logits_to_keep=parts[-1]).logits[0]
        done += count
        torch.testing.assert_close(ours, afresh(model, row[:done], parts[-1]), atol=2e-4, rtol=2e-4)
    assert done > 150


def test_rows_of_different_length() -> None:
    """Padded rows have sinks of their own, and follow their own window."""
    model, ids, mask = shallow("llama"), tokens(3, 120), torch.ones(3, 120, dtype=torch.long)
    for row, padding in enumerate((0, 7, 15)):
        mask[row, :padding] = 0
    cache = KeepCache(model, SPEC, BUDGET + COPIES, chunk=BUDGET)
    done = 0
    for count in [18, *[1] * 60]:
        done += count
        positions = (mask[:, :done].cumsum(1) - 1).clamp(min=0)[:, -count:]
        with torch.no_grad():
            ours = model(
                ids[:, done - count : done], attention_mask=mask[:, :done], position_ids=positions,
                past_key_values=cache, logits_to_keep=1,
            ).logits[:, -1]  # fmt: skip
        if count > 1:
            continue
        for row, padding in enumerate((0, 7, 15)):
            expected = afresh(model, ids[row, padding:done], 1)[-1]
            torch.testing.assert_close(ours[row], expected, atol=2e-4, rtol=2e-4)
        if done == 50:  # rows may change places
            order = torch.tensor([2, 0, 1])
            cache.reorder_cache(order)
            cache.reorder_cache(order.argsort())


def test_absolute_positions_end_in_time_and_say_so() -> None:
    model = shallow("llama")
    cache = KeepCache(model, f"{SPEC},positions=absolute", BUDGET)
    with pytest.raises(UsageError, match="60 tokens are more than the 48"):
        model(tokens(1, 60), past_key_values=cache)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        model(tokens(1, 48), past_key_values=cache)
    with pytest.raises(UsageError, match="49 tokens"):
        model(tokens(1, 1), past_key_values=cache)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="gpt2.*positions=absolute"):
        KeepCache(AutoModelForCausalLM.from_config(FAMILIES["gpt2"]()), SPEC, BUDGET)
    with pytest.raises(BudgetError, match="more positions than the model's 48"):
        KeepCache(shallow("llama"), SPEC, 40)
    with pytest.raises(UsageError, match="never come back"):
        KeepCache(shallow("llama"), f"{SPEC},positions=cache+checkpoint", BUDGET)
    cache = KeepCache(shallow("llama"), SPEC, BUDGET)
    with torch.no_grad():
        shallow("llama")(tokens(1, 48), past_key_values=cache)
    cache.crop(-15)
    with pytest.raises(UsageError, match="reset"):
        cache.crop(-31)
    assert cache.get_seq_length() == 33 == cache.layers[0].length  # nothing was cut
