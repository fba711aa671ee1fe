"""Groups: means by hand, what is newest counts, a paper as it is read today; the frontier that no row beats."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvkeep_lab.experiment import load_experiment
from kvkeep_lab.report import groups, unread
from kvkeep_lab.report.methods import AXES, NOISE, frontier
from kvkeep_lab.statistics import Estimate
from kvkeep_lab.store import Store
from kvkeep_lab.tasks.base import Metric
from results import EXPERIMENT, filled


def test_a_group_by_hand(tmp_path: Path) -> None:
    (group,) = groups([filled(tmp_path / "r.jsonl")])
    lines = {(line.method, line.budget): line for line in group.results}
    assert list(lines) == [
        ("full", None), ("h2o", "10%"), ("window", "10%"), ("quantized", "10%"),
        ("h2o", "25%"), ("window", "25%"), ("quantized", "25%"),
    ]  # fmt: skip
    line = lines["h2o", "25%"]
    assert line.scores and line.beside
    assert (line.scores["found"].mean, line.scores["found"].n, line.beside["found"].mean) == (0.5, 8, -0.5)
    assert (line.cells, line.of, line.prefill_s, line.token_s, line.entries) == (4, 4, 1.5, 0.05, (64, 64))
    assert line.held_bytes == pytest.approx(2.1e6) and [value.value for value in line.paper] == [0.75]
    assert len(line.at) == 4 and line.at[0][1]["found"] == 0.5
    assert line.values("found") == [1.0, 0.0] * 4
    assert line.minus(lines["window", "25%"].samples, "found") == [1.0, 0.0] * 4
    assert lines["full", None].beside == {} and not lines["quantized", "10%"].scores
    assert group.prompts == (127, 256) and group.name.startswith("small-smollm2-")
    assert group.comparable and "samples" not in group.as_dict()["lines"][0]


def test_the_newest_measurement_counts_and_a_failure_does_not_undo_one(tmp_path: Path) -> None:
    store = filled(tmp_path / "r.jsonl")
    first = next(row for row in store.records if row.method == "window")
    store.append(first.model_copy(update={"scores": {"found": [1.0, 1.0], "words": [1.0, 1.0], "loglik": [0.0, 0.0]}}))
    store.append(first.model_copy(update={"status": "failed", "scores": {}, "error": "no"}))
    store.refresh()
    (group,) = groups([store])
    line = next(line for line in group.results if (line.method, line.budget) == ("window", first.budget))
    assert line.cells == 4 and line.scores and line.scores["found"].mean == 0.25


def test_settings_and_models_are_apart(tmp_path: Path) -> None:
    other = EXPERIMENT.with_(task={**EXPERIMENT.model_dump(mode="json")["task"], "samples": 2, "new": 5})
    filled(tmp_path / "r.jsonl")
    store = filled(tmp_path / "r.jsonl", other)
    twins = filled(tmp_path / "s.jsonl", EXPERIMENT.with_(models=["gemma3-270m"]))
    found = groups([store, twins])
    assert len(found) == 3 and len({group.name for group in found}) == 3
    assert {group.model for group in found} == {"smollm2", "gemma3-270m"}


def test_what_another_version_wrote_is_left_out_and_named(tmp_path: Path) -> None:
    """A method that is no more takes nothing else with it."""
    old = Store(tmp_path / "old.jsonl")
    old.define("other", {**EXPERIMENT.model_dump(mode="json"), "name": "once", "methods": ["no-longer"]})
    row = filled(tmp_path / "new.jsonl").records[0]
    old.append(row.model_copy(update={"setting": "other"}))
    old.refresh()
    assert not groups([old]) and not groups([Store(tmp_path / "none.jsonl")])
    (group,) = groups([old, filled(tmp_path / "new.jsonl")])
    assert group.experiment.name == "small"
    (chapter,) = unread([old, filled(tmp_path / "new.jsonl")])
    assert not chapter.blocks and "`once`" in chapter.missing[0] and "no-longer" in chapter.missing[0]


def test_what_a_paper_says_is_as_it_is_read_today(tmp_path: Path) -> None:
    today = load_experiment("needle-25")
    assert today.paper is not None
    old = {"title": today.paper.title, "where": today.paper.where, "setting": "?", "claims": ["As it once was."]}
    (group,) = groups([filled(tmp_path / "a.jsonl", EXPERIMENT.with_(name="needle-25", paper=old))])
    assert group.experiment.paper == today.paper and group.experiment.budgets == EXPERIMENT.budgets
    other = {**old, "where": "Fig. 1000"}
    (group,) = groups([filled(tmp_path / "b.jsonl", EXPERIMENT.with_(name="needle-25", paper=other))])
    assert group.experiment.paper is not None and group.experiment.paper.setting == "?"


MEMORY, SPEED = AXES
FOUND, KL = Metric("m", "found"), Metric("m", "KL", "lower", "number")


def line(cost: float, mean: float, token_s: float | None = None) -> Any:
    return SimpleNamespace(total_bytes=cost * 1e6, token_s=token_s, scores={"m": Estimate(mean, mean, mean, 3)})


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12), st.booleans())
def test_no_other_is_cheaper_and_better(rows: list[tuple[int, int]], higher: bool) -> None:
    lines = [line(cost, mean) for cost, mean in rows]
    found = [(one.total_bytes / 1e6, one.scores["m"].mean) for one in frontier(lines, FOUND if higher else KL, MEMORY)]
    sign = 1 if higher else -1
    beaten = {
        (cost, mean)
        for cost, mean in rows
        for other, theirs in rows
        if (other <= cost and sign * theirs > sign * mean) or (other < cost and theirs == mean)
    }
    assert found == sorted({(cost, mean) for cost, mean in rows} - beaten)


def test_rounding_is_no_gain_and_what_has_no_time_is_not_fast() -> None:
    cheap, exact = line(1, 5e-12), line(2, 0.0)
    assert frontier([exact, cheap], KL, MEMORY) == [cheap]
    assert frontier([line(1, 2 * NOISE), exact], KL, MEMORY)[-1] is exact
    timed, untimed = line(1, 0.5, 0.1), line(1, 0.9)
    assert frontier([timed, untimed], FOUND, SPEED) == [timed]
