"""The request of ``endless`` that continues a text beyond the model's positions."""

from __future__ import annotations

import pytest
from families import tiny

from kvkeep import BudgetError, KeepCache, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.endless import check_keeps, endless, endless_options
from kvkeep.policies.methods import Request


def geometry(positions: int) -> ModelGeometry:
    return ModelGeometry.from_config(tiny("llama", positions=positions).config)


@pytest.mark.parametrize(
    ("positions", "budget", "spec", "kept"),
    [
        (8192, "2048", "endless", "2048"),
        (8192, None, "endless", "2048"),
        (8192, "0", "endless", "2048"),  # no newest token would be resident
        (2048, "512", "endless+passages:6", "512"),  # 512 + a chunk of 512 + 31 written + 7 * 128
        (2048, "1600", "endless+passages:6", "512"),  # no block fits beside it
        (512, None, "endless+passages:1", "64"),  # nor beside 128
        (8192, "25%", "endless", "25%"),
    ],
)
def test_it_has_the_budget_and_the_blocks_that_fit(positions: int, budget: str | None, spec: str, kept: str) -> None:
    made = endless(Request.parse("kv-direct" if budget else "full", budget), geometry(positions))
    assert made.method.name == spec and str(made.budget) == kept
    cache = KeepCache(tiny("llama", positions=positions), request=made)  # which refuses what does not fit
    assert cache.exact_tokens == positions


def test_other_options_stay_but_for_the_kind_of_checkpoint() -> None:
    given = Request.parse("snapkv+verified", 64, checkpoint="residual", where="host", chunk=32)
    made = endless(given, geometry(512))
    assert (made.checkpoint, made.where, made.chunk) == ("kv", "host", 32)
    assert endless(made, geometry(512)) == made
    assert Request.parse(**endless_options({"budget": 64, "where": "host", "chunk": 32}, geometry(512))) == made


@pytest.mark.parametrize("method", ["h2o", "streaming-llm", "snapkv+quantize:4"])
def test_a_method_that_does_not_keep_every_entry_is_refused(method: str) -> None:
    with pytest.raises(UsageError, match="does not keep every entry, so 'endless' could not recall"):
        check_keeps(Request.parse(method, 64))


def test_too_few_positions_are_refused() -> None:
    with pytest.raises(BudgetError, match="200 positions have no space for endless's passages of 128 tokens"):
        endless(Request.parse("full"), geometry(200))
