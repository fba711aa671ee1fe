"""A stream has the perplexity of a plain forward pass, and continues as long as the method can."""

from __future__ import annotations

import pytest
import torch
from families import VOCABULARY, tiny
from kvkeep_lab.studies.stream import stretches
from transformers import DynamicCache

from kvkeep import KeepCache, UsageError

IDS = torch.randint(2, VOCABULARY, (150,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("cache", ["stock", "kv-direct"])
def test_perplexity_equals_that_of_one_forward_pass(cache: str) -> None:
    model = tiny("llama")
    ours = DynamicCache(config=model.config) if cache == "stock" else KeepCache(model, cache, 16)
    rows = list(stretches(model, IDS, ours, 60))
    assert [(row.start, row.tokens) for row in rows] == [(0, 60), (60, 60), (120, 29)]
    with torch.no_grad():
        logits = model(torch.tensor([IDS[:-1]])).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(IDS[1:]), reduction="none")
    for row in rows:
        expected = losses[row.start : row.start + row.tokens].mean().exp().item()
        assert row.perplexity == pytest.approx(expected, rel=1e-3)


def test_memory_is_constant_beyond_the_models_positions() -> None:
    """The tiny model has 512 positions, and positions are moved back twice."""
    rows = list(stretches(tiny("llama"), IDS * 8, KeepCache(tiny("llama"), "streaming-llm", 64), 100))
    assert rows[-1].start == 1100 and len({row.memory.resident_bytes for row in rows[1:]}) == 1
    assert len({row.memory.bookkeeping_bytes for row in rows[1:]}) == 1


def test_endless_streams_a_text_beyond_the_positions_in_the_same_resident_bytes() -> None:
    model = tiny("llama")
    rows = list(stretches(model, IDS * 8, KeepCache(model, "endless+passages:count=3,size=16", 64), 100))
    assert rows[-1].start == 1100 and len({row.memory.resident_bytes for row in rows[1:]}) == 1
    unbounded = list(stretches(model, (IDS * 8)[:501], KeepCache(model, "full"), 100))
    for row, whole in zip(rows, unbounded, strict=False):
        assert row.perplexity == pytest.approx(whole.perplexity, rel=1e-4)


def test_absolute_positions_end_before_a_stretch_beyond_them() -> None:
    rows = stretches(tiny("llama"), IDS * 8, KeepCache(tiny("llama"), "h2o", 64), 200)
    assert [next(rows).start, next(rows).start] == [0, 200]
    with pytest.raises(UsageError, match="600 tokens exceed the model's 512"):
        next(rows)
