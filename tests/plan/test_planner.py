"""The plan: what fits, what is worth having, what is recommended."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from families import FAMILIES, SMOLLM2, tiny
from transformers import MambaConfig, MistralConfig, Qwen3MoeConfig

from kvkeep import Fate, KeepCache
from kvkeep.budget import MIN_CHUNK, bytes_of
from kvkeep.errors import BudgetError, KvkeepError, UnsupportedModelError, UsageError
from kvkeep.plan import planner
from kvkeep.plan.candidates import Candidate, candidates
from kvkeep.plan.costs import cost, verified
from kvkeep.plan.machine import SHEET, Machine, at
from kvkeep.plan.planner import plan, recommend
from kvkeep.plan.shape import Shape, shape_of
from kvkeep.plan.sizes import sizes
from kvkeep.policies.registry import FATES, PRESETS, RECALLS, SELECTORS, Preset

DOCS = Path(__file__).parents[2] / "docs" / "machines"
H100 = Machine.load(DOCS / "h100-sxm.json")
PLAIN = Machine.from_sheet(
    name="a plain one", device="cpu", flops=2e11, memory=2e10, link=None, disk=1e9, memory_bytes=16e9, host_bytes=16e9,
    layer_step=3e-4, dtype_bytes=4,
)  # fmt: skip


@cache
def llama() -> Shape:
    return shape_of(SMOLLM2, 4)


def test_shapes_are_those_of_the_models() -> None:
    for family in FAMILIES:
        shape = shape_of(FAMILIES[family](), 4)
        assert shape.weights == sum(parameter.numel() for parameter in tiny(family).parameters())
        assert 0 < shape.active <= shape.layer
    assert shape_of(FAMILIES["llama"](), 4).active == shape_of(FAMILIES["llama"](), 4).layer


def test_a_mixture_reads_the_experts_that_were_chosen() -> None:
    shape = shape_of(Qwen3MoeConfig(num_hidden_layers=2, num_experts=32, num_experts_per_tok=4), 2)
    assert shape.touched(1) == pytest.approx(shape.active)
    assert shape.active < shape.touched(4) < shape.touched(64) < shape.layer * 1.0001
    assert shape.touched(1000) == pytest.approx(shape.layer)


@pytest.mark.parametrize("chosen", [2, 8])
def test_a_mixture_of_gemma_4_is_planned(chosen: int) -> None:
    """It names what a token goes through as no other does; all its experts are a mixture, too."""
    config = FAMILIES["gemma4"]()
    config.update({"enable_moe_block": True, "num_experts": 8, "top_k_experts": chosen, "moe_intermediate_size": 24})
    shape = shape_of(config, 4)
    assert (shape.experts, shape.chosen) == (8, chosen)
    experts = 8 * 3 * config.hidden_size * 24
    assert shape.layer - shape.active == pytest.approx(experts * (8 - chosen) / 8)
    assert shape.touched(1) == pytest.approx(shape.active) and shape.touched(10**4) == pytest.approx(shape.layer)
    assert plan(shape, PLAIN, 200, 10**8).best.cost.step > 0


@pytest.mark.parametrize("machine", [PLAIN, H100], ids=["cpu", "accelerator"])
def test_time_grows_with_the_context_and_with_what_is_recalled(machine: Machine) -> None:
    shape = llama()
    for candidate in candidates(shape.geometry):
        last = 0.0, 0.0
        for tokens in (1024, 2048, 4096, 8192):
            budget = None if candidate.keeps_all else tokens // 4
            costs = cost(shape, candidate, sizes(shape.geometry, candidate, tokens, budget), machine, 0.95)
            assert costs.step >= last[0] and costs.prefill > last[1]
            last = costs.step, costs.prefill
        if candidate.method.fate.checkpoints and not candidate.method.recall.backed:
            held = [sizes(shape.geometry, candidate, 4096, entries) for entries in (256, 3584)]
            few, many = (cost(shape, candidate, own, machine, 0.95).step for own in held)
            assert few > many


def test_no_row_of_the_frontier_is_beaten_and_every_other_is() -> None:
    planned = plan(llama(), PLAIN, 4096, 300_000_000)
    promises = {"exact": 0, "reversible": 1, "lossy": 2}
    points = [(row.memory, row.cost.step, promises[row.exactness], -row.sizes.kept) for row in planned.rows]
    best = [point for row, point in zip(planned.rows, points, strict=True) if row.frontier]
    for row, point in zip(planned.rows, points, strict=True):
        beaten = any(all(a <= b for a, b in zip(other, point, strict=True)) and other != point for other in points)
        assert beaten or point in best
        assert not (row.frontier and beaten)
    assert len(set(best)) == len(best) > 3
    assert all(row.memory <= 300_000_000 for row in planned.rows)


def test_what_fits_whole_is_kept_whole_and_what_does_not_is_recalled() -> None:
    roomy = plan(llama(), PLAIN, 4096, 10**9)
    assert roomy.best.candidate.keeps_all and roomy.best.exactness == "exact"
    tight = plan(llama(), PLAIN, 4096, 30_000_000)
    assert str(tight.best.candidate) == "snapkv+verified kv@disk"
    assert tight.best.memory <= 30_000_000 and "too small for 'full', which needs" in tight.reason
    assert {row.exactness for row in plan(llama(), PLAIN, 4096, 30_000_000, exact=True).rows} == {"exact"}


def test_too_little_memory_names_the_least_that_would_do() -> None:
    with pytest.raises(BudgetError, match=r"fits into 1.0 KB: the least is .* KB, for ") as raised:
        plan(llama(), PLAIN, 4096, 1000)
    least = bytes_of(str(raised.value).partition("the least is ")[2].partition(",")[0])
    assert plan(llama(), PLAIN, 4096, least).rows
    with pytest.raises(BudgetError):
        plan(llama(), PLAIN, 4096, least - 100)  # it is rounded up to a tenth of a kilobyte


@pytest.mark.parametrize("spec", ["lowrank", "quantized:8", "asymkv", "kvslimmer"])
def test_a_method_that_cannot_do_with_few_entries_is_planned_from_its_least_on(spec: str) -> None:
    def memory(entries: int) -> int:
        return sizes(llama().geometry, Candidate.parse(spec), 1024, entries, steps=8).memory(PLAIN.shared)

    def works(entries: int) -> bool:
        try:
            return memory(entries) > 0
        except BudgetError:
            return False

    least = next(filter(works, range(MIN_CHUNK, 1024)))
    given = memory(least + 10)
    most = max(entries for entries in range(least, 512) if memory(entries) <= given)
    rows = [row for row in plan(llama(), PLAIN, 1024, given, answer=8).rows if row.candidate.spec == spec]
    assert MIN_CHUNK < least < most and {least, most} <= {row.budget for row in rows}


def test_bad_requests_are_refused() -> None:
    for tokens, given, sentence in (
        (8193, {}, "8,192 positions"), (100, {"acceptance": 1.5}, "share from 0 to 1"), (0, {}, "1 token"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=sentence):
            plan(llama(), PLAIN, tokens, 10**9, **given)
    with pytest.raises(KvkeepError, match="window"):
        plan(shape_of(MistralConfig(num_hidden_layers=2, sliding_window=64)), PLAIN, 100, 10**9)
    with pytest.raises(UnsupportedModelError):
        shape_of(MambaConfig())


def test_rounds_of_drafts() -> None:
    exact = [1.0 + 0.01 * rows for rows in range(1, 34)]
    drafts, seconds = verified(0.1, exact, 0.95)
    by_hand = {k: (k * 0.1 + exact[k]) * 0.05 / (1 - 0.95 ** (k + 1)) for k in range(1, 33)}
    assert seconds == pytest.approx(min(by_hand.values())) and by_hand[drafts] == pytest.approx(seconds)
    assert verified(0.1, exact, 0.0) == (1, pytest.approx(0.1 + exact[1]))
    assert verified(0.0, exact, 1.0)[0] == 32
    assert verified(0.1, exact, 0.5)[1] > seconds


def test_the_large_models_are_planned_from_their_configs() -> None:
    from kvkeep.models.loading import describe

    for name, weights in (("llama-3.1-8b", 8.03e9), ("llama-3.1-70b", 70.55e9)):
        shape = shape_of(describe(DOCS / f"{name}.json").config)
        assert shape.weights == pytest.approx(weights, rel=0.01)
        planned = plan(shape, H100, 131072, 4 * 10**9, exact=True)
        assert planned.best.candidate.spec == "snapkv+verified" and planned.best.candidate.where != "device"
        assert H100.source == SHEET in planned.machine.source


def test_machines_are_kept_as_they_were(tmp_path: Path) -> None:
    PLAIN.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == PLAIN
    assert at(((1.0, 10.0), (4.0, 40.0)), 2) == pytest.approx(20)
    assert at(((1.0, 10.0), (4.0, 40.0)), 0.5) == 10 and at(((1.0, 10.0), (4.0, 40.0)), 9) == 40


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"name": "x"}', '{"matrix": 3}', '{"matrix": {}}'])
def test_a_machine_that_cannot_be_read_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "machine.json").write_text(text)
    with pytest.raises(UsageError, match="machine"):
        Machine.load(tmp_path / "machine.json")
    with pytest.raises(UsageError, match="no such file"):
        Machine.load(tmp_path / "nowhere.json")


WRONG = {
    "copy": ("fast", None, 0, -1, True, math.nan, math.inf, 10**400),
    **{name: (0,) for name in ("memory", "link", "disk", "disk_cold", "disk_write", "elementwise")},
    **{name: (0,) for name in ("dtype_bytes", "memory_bytes", "host_bytes")},
    **{name: ("x", None, -1.0, math.inf, False) for name in ("layer_s", "bounded_s", "page_s")},
    "matrix": ({}, {"0": [[1, 1]]}, {"512": [[1, math.nan]]}),
    "attention": ([], [[1, 0]], [[1, math.inf]], [[2, 1], [1, 1]], [["1", 1]]),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_machine_that_was_measured_has_numbers_to_calculate_with(tmp_path: Path, field: str) -> None:
    path = tmp_path / "machine.json"
    explained = replace(PLAIN, layer_s=0.0, bounded_s=0.0, page_s=0.0)  # trials may leave nothing to explain
    explained.save(path)
    assert Machine.load(path) == explained
    given = json.loads(path.read_text())
    for wrong in WRONG[field]:
        path.write_text(json.dumps(given | {field: wrong}))
        with pytest.raises(UsageError, match="cannot be understood"):
            Machine.load(path)


def test_a_recommendation_builds_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "machine_here", lambda *given: PLAIN)
    model = tiny("llama")
    for memory in (10**9, 100_000):
        choice = recommend(model, 400, memory, answer=20)
        built = KeepCache(model, **choice.options())
        assert built.method.name == choice.method and "exact" in choice.reason and choice.rates == SHEET
    assert choice.method == "snapkv+verified"


def test_no_more_is_drafted_than_there_is_room_for() -> None:
    rounds = [row for row in plan(llama(), PLAIN, 4096, 10**9, acceptance=1.0).rows if row.cost.drafts]
    assert {row.budget for row in rounds} >= {256}
    for row in rounds:
        assert row.budget is not None and row.cost.drafts <= min(24, row.budget // 2 - 1)


@patch.dict(SELECTORS)
@patch.dict(FATES)
@patch.dict(RECALLS)
@patch.dict(PRESETS)
def test_parts_of_others_are_planned() -> None:
    """The guide's fate and recall, with a cost for what they read, more of it as the text grows."""
    guide = (DOCS.parent / "extending.md").read_text(encoding="utf-8").partition("## Try it")[0]
    found: dict[str, Any] = {"__name__": __name__}
    for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        exec(block, found)
    PRESETS["halved"] = Preset(found["LargeValues"](), found["Half"], "", "")
    PRESETS["above-half"] = Preset(found["LargeValues"](), found["Half"], "", "", recall=found["Above"]())

    class Kept(found["Half"]):  # type: ignore[misc]
        """A fate that does not say what it holds."""

        holds = Fate.holds

    PRESETS["plain"] = Preset(found["LargeValues"](), Kept, "", "")
    shape, seconds = llama(), {}
    for candidate in candidates(shape.geometry):
        for tokens in (2048, 8192):
            if not candidate.keeps_all:
                held = sizes(shape.geometry, candidate, tokens, 1024)
                seconds[str(candidate), tokens] = cost(shape, candidate, held, PLAIN, 0.95).step
    for name in ("halved", "above-half kv@disk", "plain"):
        assert seconds["large-values", 2048] < seconds[name, 2048]
    for name in ("above-half kv@disk", "plain"):
        assert seconds[name, 2048] < seconds[name, 8192]
