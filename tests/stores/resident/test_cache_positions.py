"""Positions within the cache: in a model of one layer, where an entry depends on its token alone, StreamingLLM is the
stock model reading the kept tokens afresh."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from families import tiny
from helpers import assert_near, prompt, step, stock

from kvkeep import BudgetError, KeepCache, UnsupportedModelError, UsageError

BUDGET, SINKS = 20, 3
COPIES = 2  # of the sinks' keys, in entries: the budget counts them
SPEC = f"streaming-llm:sinks={SINKS}"
shallow = partial(tiny, layers=1, positions=48)


def afresh(family: str, row: torch.Tensor, new: int) -> torch.Tensor:
    """Logits of the last ``new`` tokens of ``row``: a single one sees B entries with itself, a chunk B before it."""
    before, model = len(row) - new, shallow(family)
    room = BUDGET - 1 if new == 1 else BUDGET
    kept = row[:before] if before <= room else torch.cat([row[:SINKS], row[before - (room - SINKS) : before]])
    return step(model, stock(model), torch.cat([kept, row[before:]])[None], logits_to_keep=new)[0]


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3"])
@pytest.mark.parametrize("first", [1, 28])
def test_equals_reading_what_is_kept(family: str, first: int) -> None:
    """Far past the model's 48 positions, in chunks and single steps, so that positions are moved back several times."""
    row, done = prompt(1, 200)[0], 0
    cache = KeepCache(shallow(family), SPEC, BUDGET + COPIES, chunk=BUDGET)
    for count in [first, *[1] * 40, 7, 20, *[1] * 50, 13, *[1] * 20]:
        # A chunk longer than the cache's is cut, and its parts see what is kept in between.
        last = count % BUDGET or BUDGET
        ours = step(shallow(family), cache, row[None, done : done + count], logits_to_keep=last)[0]
        done += count
        assert_near(ours, afresh(family, row[:done], last))
    assert done > 150


def test_absolute_positions_end_in_time_and_say_so() -> None:
    model = shallow("llama")
    cache = KeepCache(model, f"{SPEC},positions=absolute", BUDGET)
    with pytest.raises(UsageError, match="60 tokens exceed the model's 48"):
        step(model, cache, prompt(1, 60))
    assert cache.get_seq_length() == 0
    step(model, cache, prompt(1, 48))
    with pytest.raises(UsageError, match="49 tokens"):
        step(model, cache, prompt(1, 1))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="gpt2.*positions=absolute"):
        KeepCache(tiny("gpt2"), SPEC, BUDGET)
    with pytest.raises(BudgetError, match="more positions than the model's 48"):
        KeepCache(shallow("llama"), SPEC, 40)
    cache = KeepCache(shallow("llama"), SPEC, BUDGET)
    step(shallow("llama"), cache, prompt(1, 48))
    cache.crop(-15)
    with pytest.raises(UsageError, match="reset"):
        cache.crop(-31)
    assert cache.get_seq_length() == 33 == cache.layers[0].length  # nothing was cut
