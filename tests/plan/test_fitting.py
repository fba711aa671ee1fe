"""What fits in a memory, in which order it is shown, and what a budget of ``auto`` takes."""

from __future__ import annotations

from functools import cache as memoised
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from families import tiny
from helpers import prompt, step
from transformers import MistralConfig

from kvkeep import Fate, KeepCache
from kvkeep.budget import bytes_of
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.plan.fitting import choose, listed, plan
from kvkeep.plan.sizes import grant
from kvkeep.policies.methods import resolve
from kvkeep.policies.registry import FATES, PRESETS, Preset
from kvkeep.policies.selectors.window import Window

LENGTH = 400


@memoised
def geometry() -> ModelGeometry:
    return ModelGeometry.of(tiny("llama"))


@pytest.mark.turns(3)
@pytest.mark.parametrize("budget", ["25%", "160", "120KB"])
def test_every_row_is_the_memory_of_that_cache(budget: str) -> None:
    """To the byte, where the budgets of layers are not measured on the model; and within the peak, which decides
    whether it fits."""
    methods, ids = [name for name in listed() if "fisher" not in name], prompt(1, LENGTH)
    rows, left_out = plan(geometry(), LENGTH, 10**9, budget, methods)
    assert len(rows) == len(methods) > 20 and not left_out
    for row in rows:
        options: dict[str, Any] = {"context": LENGTH}
        if row.method.budgeted or not row.method.selector.keeps_all:
            options["budget"] = row.sizes.budget if row.method.selector.keeps_all else budget
        cache = KeepCache(tiny("llama"), row.method.name, **options)
        assert cache.spec == row.spec and cache.entries == row.sizes.budget
        step("llama", cache, ids)
        memory, shown = cache.memory(), row.as_dict()
        assert memory.resident_bytes == shown["resident_bytes"] and memory.compressed_bytes == shown["compressed_bytes"]
        assert memory.checkpoint_bytes == shown["checkpoint_bytes"]
        assert memory.peak_cache_bytes + memory.checkpoint_bytes["host"] <= row.peak
        assert row.fitting * row.peak <= 10**9 < (row.fitting + 1) * row.peak


def test_what_fits_comes_first_led_by_full_and_kv_direct() -> None:
    whole = grant(geometry(), resolve("full"), None, LENGTH)
    for memory, first in ((whole, ["full", "kv-direct"]), (whole - 1, ["kv-direct"])):
        rows, _ = plan(geometry(), LENGTH, memory, "25%", listed())
        assert [row.method.name for row in rows][: len(first)] == first
        assert all((row.fitting > 0) == (row.peak <= memory) for row in rows)
        order = {"exact": 0, "reversible": 1, "lossy": 2}
        for one, other in pairwise(row for row in rows if row.method.name not in first):
            places = [(not row.fitting, row.method.name != "full", order[row.method.exactness]) for row in (one, other)]
            assert places == sorted(places)


def test_a_method_that_does_not_work_is_left_out_with_its_reason() -> None:
    class Faulty(FATES["drop"]):  # type: ignore[name-defined,misc]
        """A fate of a plugin that fails."""

        def holds(self, *given: Any) -> Any:
            raise ZeroDivisionError("by nought")

    with patch.dict(PRESETS, {"faulty": Preset(Window(), Faulty, "", "")}):
        rows, left_out = plan(geometry(), LENGTH, 10**9, "20", ["kv-direct", "faulty", "lowrank", "kvzip"])
    assert [row.method.name for row in rows] == ["kv-direct"]
    assert "by nought" in left_out["faulty"] and "budget" in left_out["lowrank"] and "shape" in left_out["kvzip"]


def test_a_fate_that_does_not_say_what_it_holds_is_planned() -> None:
    class Silent(FATES["drop"]):  # type: ignore[name-defined,misc]
        """A fate without bytes."""

        holds = Fate.holds

    with patch.dict(PRESETS, {"silent": Preset(Window(), Silent, "", "")}):
        silent, window = (plan(geometry(), LENGTH, 10**9, "25%", [name])[0] for name in ("silent", "window"))
    assert silent[0].sizes == window[0].sizes


@pytest.mark.parametrize("context", [0, 10**6])
def test_a_context_that_the_model_does_not_have_is_refused(context: int) -> None:
    with pytest.raises(UsageError, match="positions"):
        plan(geometry(), context, 10**9, "25%", listed())


def test_full_is_taken_where_it_fits_and_kv_direct_with_the_largest_budget_where_not() -> None:
    whole = grant(geometry(), resolve("full"), None, LENGTH)
    assert choose(geometry(), LENGTH, whole, shared=True).options == {"method": "full"}
    for memory in (whole - 1, whole // 2):
        choice = choose(geometry(), LENGTH, memory, shared=True)
        built = KeepCache(tiny("llama"), **choice.options)
        assert built.method.name == "kv-direct" and built.exactness == "exact" and built.spec is not None
        assert f"with {built.entries:,} entries a layer" in choice.reason and "'full' would take" in choice.reason
        assert built.entries is not None
        taken = [
            grant(geometry(), built.method, entries, LENGTH, built.spec)
            for entries in (built.entries, built.entries + 1)
        ]
        assert taken[0] <= memory < taken[1] or built.entries == LENGTH - 1
        step("llama", built, prompt(1, LENGTH))
        assert built.memory().peak_cache_bytes <= memory


def test_where_entries_go_depends_on_what_counts() -> None:
    half = grant(geometry(), resolve("full"), None, LENGTH) // 2
    places = [choose(geometry(), LENGTH, half, shared=shared).options["where"] for shared in (True, False)]
    assert places == ["disk", "host"]


def test_too_little_memory_names_the_least_that_would_do() -> None:
    with pytest.raises(BudgetError, match="'kv-direct' at least ") as raised:
        choose(geometry(), LENGTH, 1000, shared=True)
    least = bytes_of(str(raised.value).rpartition("at least ")[2].rstrip("."))
    assert choose(geometry(), LENGTH, least, shared=True).options["budget"] >= 16
    with pytest.raises(BudgetError):
        choose(geometry(), LENGTH, least - 200, shared=True)  # it is rounded up to a tenth of a kilobyte


def test_layers_that_a_budget_cannot_limit_are_refused_only_where_they_need_one() -> None:
    sliding = ModelGeometry.from_config(MistralConfig(num_hidden_layers=2, sliding_window=64), 4)
    assert choose(sliding, 100, 10**9, shared=True).options == {"method": "full"}
    with pytest.raises(BudgetError, match="'full' takes .* and: Budget"):
        choose(sliding, 100, 1000, shared=True)
