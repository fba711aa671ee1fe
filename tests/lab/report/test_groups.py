"""Groups of records: means, newest measurements, the frontier, and verdicts on claims."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from itertools import chain, combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvkeep_lab.experiment import load_experiment
from kvkeep_lab.report import groups, unread
from kvkeep_lab.report.chapter import VerdictOutcome
from kvkeep_lab.report.methods import AXES, NOISE, frontier, with_same_places
from kvkeep_lab.report.tasks import TaskGroup
from kvkeep_lab.report.verdicts import JudgedCase, judge, judged_cases
from kvkeep_lab.statistics import Estimate, student
from kvkeep_lab.store import ResultFile
from kvkeep_lab.tasks.base import Metric
from results import EXPERIMENT, PAPER, chapters, filled, stored
from results import FOUND as FOUND_BY


def test_a_group_has_the_means_computed_by_hand(tmp_path: Path) -> None:
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


def test_the_newest_successful_measurement_counts(tmp_path: Path) -> None:
    store = filled(tmp_path / "r.jsonl")
    first = next(row for row in store.records if row.method == "window")
    store.append(first.model_copy(update={"scores": {"found": [1.0, 1.0], "words": [1.0, 1.0], "loglik": [0.0, 0.0]}}))
    store.append(first.model_copy(update={"status": "failed", "scores": {}, "error": "no"}))
    store.refresh()
    (group,) = groups([store])
    line = next(line for line in group.results if (line.method, line.budget) == ("window", first.budget))
    assert line.cells == 4 and line.scores and line.scores["found"].mean == 0.25


def test_settings_and_models_make_separate_groups(tmp_path: Path) -> None:
    other = EXPERIMENT.with_(task={**EXPERIMENT.model_dump(mode="json")["task"], "samples": 2, "new": 5})
    filled(tmp_path / "r.jsonl")
    store = filled(tmp_path / "r.jsonl", other)
    twins = filled(tmp_path / "s.jsonl", EXPERIMENT.with_(models=["gemma3-270m"]))
    found = groups([store, twins])
    assert len(found) == 3 and len({group.name for group in found}) == 3
    assert {group.model for group in found} == {"smollm2", "gemma3-270m"}


def test_records_of_unknown_methods_are_left_out_and_named(tmp_path: Path) -> None:
    """The other records are still grouped."""
    old = ResultFile(tmp_path / "old.jsonl")
    old.define("other", {**EXPERIMENT.model_dump(mode="json"), "name": "once", "methods": ["no-longer"]})
    row = filled(tmp_path / "new.jsonl").records[0]
    old.append(row.model_copy(update={"setting": "other"}))
    old.refresh()
    assert not groups([old]) and not groups([ResultFile(tmp_path / "none.jsonl")])
    (group,) = groups([old, filled(tmp_path / "new.jsonl")])
    assert group.experiment.name == "small"
    (chapter,) = unread([old, filled(tmp_path / "new.jsonl")])
    assert not chapter.blocks and "`once`" in chapter.missing[0] and "no-longer" in chapter.missing[0]


def test_a_baseline_with_a_budget_is_compared_at_each_budget(tmp_path: Path) -> None:
    (group,) = groups([filled(tmp_path / "r.jsonl", EXPERIMENT.with_(baseline="h2o", paper=None))])
    lines = {(line.method, line.budget): line for line in group.results}
    for budget in ("10%", "25%"):
        mine, base = lines["window", budget], lines["h2o", budget]
        less = mine.scores["loglik"].mean - base.scores["loglik"].mean
        assert mine.beside["loglik"].mean == pytest.approx(less) and not base.beside


def test_claims_come_from_the_packaged_experiment_and_not_from_the_store(tmp_path: Path) -> None:
    today = load_experiment("needle-25")
    assert today.paper is not None
    old = {"title": today.paper.title, "where": today.paper.where, "setting": "?", "claims": ["As it once was."]}
    (group,) = groups([filled(tmp_path / "a.jsonl", EXPERIMENT.with_(name="needle-25", paper=old))])
    assert group.experiment.paper == today.paper and group.experiment.budgets == EXPERIMENT.budgets
    gone = filled(tmp_path / "c.jsonl", EXPERIMENT.with_(name="bounded", paper=old))  # which has none today
    assert [group.experiment.paper for group in groups([gone])] == [None]
    other = {**old, "where": "Fig. 1000"}
    (group,) = groups([filled(tmp_path / "b.jsonl", EXPERIMENT.with_(name="needle-25", paper=other))])
    assert group.experiment.paper is not None and group.experiment.paper.setting == "?"


def powerset(values: Iterable[int]) -> Iterator[tuple[int, ...]]:
    every = list(values)
    return chain.from_iterable(combinations(every, size) for size in range(len(every) + 1))


MEMORY, SPEED = AXES
FOUND, KL = Metric("m", "found"), Metric("m", "KL", "lower", "number")


def line(cost: float, mean: float, token_s: float | None = None) -> Any:
    return SimpleNamespace(total_bytes=cost * 1e6, token_s=token_s, scores={"m": Estimate(mean, mean, mean, 3)})


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12), st.booleans())
def test_the_frontier_has_exactly_the_undominated_rows(rows: list[tuple[int, int]], higher: bool) -> None:
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


def test_the_frontier_ignores_rounding_and_rows_without_a_time() -> None:
    cheap, exact = line(1, 5e-12), line(2, 0.0)
    assert frontier([exact, cheap], KL, MEMORY) == [cheap]
    assert frontier([line(1, 2 * NOISE), exact], KL, MEMORY)[-1] is exact
    timed, untimed = line(1, 0.5, 0.1), line(1, 0.9)
    assert frontier([timed, untimed], FOUND, SPEED) == [timed]


def test_a_row_without_the_first_metric_is_in_no_figure(tmp_path: Path) -> None:
    """Nor are there times of a row whose records have none."""
    path = tmp_path / "results.jsonl"
    filled(path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record.get("method") == "h2o":
            record |= {"scores": {}, "prefill_s": []}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (group,) = groups([stored(path)])
    assert {one.method for one in group.measured} == {"full", "window", "quantized"}
    assert {one.prefill_s for one in group.results if one.method == "h2o"} == {None}
    assert chapters(stored(path))


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), max_size=6))
def test_compared_results_have_all_places_of_one_of_them(places: list[set[int]]) -> None:
    results: list[Any] = [SimpleNamespace(samples=dict.fromkeys(one)) for one in places]
    found, common = with_same_places(results)
    assert found == [result for result in results if common and common <= result.samples.keys()]
    for subset in map(set, powerset(range(6))):
        having = [one for one in places if subset <= one]
        assert subset not in places or len(having) * len(subset) <= len(found) * len(common)


def test_a_row_with_easier_samples_is_on_no_frontier(tmp_path: Path) -> None:
    """Window has one of four places, and the highest mean."""
    store = filled(tmp_path / "r.jsonl")
    (whole,) = groups([store])
    assert [one.as_dict() for one in whole.same_samples.measured] == [one.as_dict() for one in whole.measured]
    first = next(row for row in store.records if row.method == "window")
    store.records = [row for row in store.records if row.method != "window" or row is first]
    first.scores["found"] = [2.0] * len(first.scores["found"])
    (group,) = groups([store])
    rows, compared = group.measured, group.same_samples.measured
    assert [one.as_dict() for one in compared] == [one.as_dict() for one in rows if one.method != "window"]
    said = f"{len(rows) - 1} of {len(rows)} rows are compared, on the samples that all of them have (N = 8)"
    assert any(said in block for block in group.blocks() if isinstance(block, str))


def test_a_frontier_leaves_out_places_that_few_rows_have(tmp_path: Path) -> None:
    store = filled(tmp_path / "r.jsonl")
    (whole,) = groups([store])
    assert not any("rows are compared" in block for block in whole.blocks() if isinstance(block, str))
    store.records = [row for row in store.records if row.method == "full" or row.point["length"] == 128]
    (group,) = groups([store])
    rows = group.same_samples.measured
    assert [row.method for row in rows] == [row.method for row in group.measured]
    assert {len(row.samples) for row in rows} == {2} and len(group.measured[0].samples) == 4
    said = f"{len(rows)} of {len(rows)} rows are compared, on the samples that all of them have (N = 4)"
    assert any(said in block for block in group.blocks() if isinstance(block, str))


SHARE = (0.0, 1.0)
HOLDS, DIFFERS, OPEN = VerdictOutcome.HOLDS, VerdictOutcome.DIFFERS, VerdictOutcome.OPEN
MEASURED, UNMEASURED = VerdictOutcome.MEASURED, VerdictOutcome.UNMEASURED


@pytest.mark.parametrize(
    ("values", "limits", "scale", "outcome"),
    [
        ([0.50, 0.51, 0.52], {"at_least": 0.4}, SHARE, HOLDS),
        ([0.50, 0.51, 0.52], {"at_least": 0.4, "at_most": 0.6}, SHARE, HOLDS),
        ([0.50, 0.51, 0.52], {"at_most": 0.4}, SHARE, DIFFERS),
        ([0.50, 0.51, 0.52], {"at_least": 0.6}, SHARE, DIFFERS),
        ([0.50, 0.51, 0.52], {"at_least": 0.505}, SHARE, OPEN),
        ([0.50, 0.51, 0.52], {"at_least": 0.51, "at_most": 0.51}, SHARE, OPEN),  # one number, met
        ([0.50, 0.51, 0.52], {"at_least": 0.9, "at_most": 0.9}, SHARE, DIFFERS),  # and not met
        ([0.5], {"at_least": 0.1}, SHARE, OPEN),  # of one sample there is no interval
        ([5.0], {"at_most": 0.1}, None, OPEN),
        ([0.1, 0.9], {"at_least": 0.05}, SHARE, OPEN),  # the bootstrap interval would be within
        ([0.0] * 5, {"at_most": 0.3}, SHARE, OPEN),  # five that agree are few
        ([0.0] * 50, {"at_most": 0.3}, SHARE, HOLDS),
        ([0.0] * 5, {"at_least": 0.6}, SHARE, DIFFERS),
        ([1.0, 1.0], {"at_least": 1.0}, SHARE, HOLDS),  # all there is of "always"
        ([1.0], {"at_least": 1.0}, SHARE, HOLDS),
        ([1.0, 0.99], {"at_least": 1.0}, SHARE, DIFFERS),  # and one is enough against it
        ([0.99], {"at_least": 1.0}, SHARE, DIFFERS),
        ([0.0, 0.01], {"at_most": 0.0}, SHARE, DIFFERS),
        ([0.0, 0.0], {"at_least": 0.0}, (-1.0, 1.0), HOLDS),  # no difference at all
        ([0.1, -0.1], {"at_least": 0.0}, (-1.0, 1.0), OPEN),
        ([3.0, 3.1], {"at_most": 7.0}, None, HOLDS),
        ([3.0, 3.1], {"at_least": 7.0, "at_most": 14.0}, None, DIFFERS),
        ([1.0, 5.0], {"at_least": 7.0, "at_most": 14.0}, None, OPEN),
    ],
)
def test_claims_are_judged_by_their_interval(
    values: list[float], limits: dict[str, float], scale: Any, outcome: VerdictOutcome
) -> None:
    found, interval = judge(values, **limits, scale=scale or (-math.inf, math.inf))
    assert found is outcome and interval.n == len(values)
    assert interval.low <= interval.mean <= interval.high


def test_limits_of_a_claim_are_inclusive() -> None:
    interval = student([1.0, 2.0, 4.0])
    assert judge([1.0, 2.0, 4.0], interval.low, interval.high)[0] is HOLDS
    assert judge([1.0, 2.0, 4.0], interval.low + 1e-9, interval.high)[0] is OPEN
    assert judge([1.0, 2.0, 4.0], interval.high)[0] is OPEN
    assert judge([1.0, 2.0, 4.0], interval.high + 1e-9)[0] is DIFFERS
    assert judge([1.0, 2.0, 4.0], at_most=interval.low - 1e-9)[0] is DIFFERS


def group_of(path: Path, **claim: Any) -> TaskGroup:
    paper = {**PAPER, "claims": [{"says": "So it is.", "metric": "found", **claim}], "values": []}
    (group,) = groups([filled(path / "r.jsonl", EXPERIMENT.with_(paper=paper))])
    assert isinstance(group, TaskGroup)
    return group


def cases_of(path: Path, **claim: Any) -> list[JudgedCase]:
    group = group_of(path, **claim)
    (claim,) = group.experiment.claims
    return judged_cases(claim, group.metric("found"), group.cases(claim))


def outcomes(path: Path, **claim: Any) -> dict[tuple[str, str | None], VerdictOutcome]:
    return {(one.case.name.replace("`", ""), one.case.budget): one.outcome for one in cases_of(path, **claim)}


def test_a_claim_has_a_case_for_each_method_budget_and_rival(tmp_path: Path) -> None:
    assert outcomes(tmp_path / "a", methods=["window", "h2o+merge"], at_least=0.9) == {
        ("window", "10%"): DIFFERS, ("window", "25%"): DIFFERS,
        ("h2o+merge", "10%"): UNMEASURED, ("h2o+merge", "25%"): UNMEASURED,
    }  # fmt: skip
    assert outcomes(tmp_path / "b", methods=["quantized", "full"], budgets=["10%"], at_least=1.0) == {
        ("quantized", "10%"): UNMEASURED, ("full", None): HOLDS,
    }  # fmt: skip
    # The baseline takes no budget and stands beside every one; h2o finds 4 of 8, full 8.
    assert outcomes(tmp_path / "c", methods=["h2o"], than=["full", "window", "quantized"], at_most=0.0) == {
        ("h2o less full", "10%"): OPEN, ("h2o less window", "10%"): OPEN, ("h2o less quantized", "10%"): UNMEASURED,
        ("h2o less full", "25%"): OPEN, ("h2o less window", "25%"): OPEN, ("h2o less quantized", "25%"): OPEN,
    }  # fmt: skip


def test_intervals_widen_with_the_number_of_cases(tmp_path: Path) -> None:
    one_case = cases_of(tmp_path / "a", methods=["h2o"], budgets=["25%"], at_least=0.9)[0].found
    second = cases_of(tmp_path / "b", methods=["h2o", "window"], at_least=0.9)[1]
    assert one_case is not None and second.found is not None and second.case.budget == "25%"
    assert one_case.low > second.found.low and one_case.mean == second.found.mean == 0.5


def test_one_contradicting_case_decides_and_all_cases_are_listed(tmp_path: Path) -> None:
    (verdict,) = group_of(tmp_path, methods=["full", "window", "h2o", "quantized"], at_least=0.5).judged()
    assert (verdict.outcome, verdict.finding, verdict.samples) == (DIFFERS, "differs", 8)
    against, for_it, open_, missing = verdict.ours
    assert against.startswith("Not so: `window` at 10% and 25%: 0.0 [0.0, ") and against.endswith("] (N = 8) each.")
    assert for_it.startswith("So: `full`; `quantized` at 25%: 100.0 [") and for_it.endswith("] (N = 8) each.")
    assert open_.startswith("Undecided: `h2o` at 10% and 25%: 50.0 [")
    assert missing == "Not measured: `quantized` at 10%."
    assert verdict.reading == ("found (%) of `full`, `window`, `h2o` and `quantized` at every budget, at least 50 %")


def test_open_and_unmeasured_claims_say_so(tmp_path: Path) -> None:
    (verdict,) = group_of(tmp_path / "a", methods=["h2o"], than=["full"], at_least=-0.1).judged()
    assert verdict.finding == "undecided with 8 samples"
    assert verdict.ours[0].startswith("Undecided: `h2o` less `full` at 10% and 25%: -50.0 [")
    assert verdict.reading == "found (%) of `h2o` less that of `full` at every budget, at least -10 points"
    (verdict,) = group_of(tmp_path / "c", methods=["quantized"], at_least=1.0).judged()
    measured = "So: `quantized` at 25%: 100.0 [100.0, 100.0] (N = 8)."  # a claim holds if every case does
    assert (verdict.outcome, verdict.ours) == (UNMEASURED, (measured, "Not measured: `quantized` at 10%."))
    (verdict,) = group_of(tmp_path / "b", methods=["h2o+merge"], budgets=["25%"], at_most=0.5).judged()
    assert (verdict.outcome, verdict.samples, verdict.ours) == (UNMEASURED, 0, ("Not measured: `h2o+merge` at 25%.",))


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        ({"at_least": 0.5, "of": "machine"}, "another machine's"),
        ({"of": "machine"}, "another machine's"),
        ({"at_least": 0.5, "of": "model"}, "another model's"),
        ({"at_least": 0.5, "unlike": "read at once"}, "measured otherwise: read at once"),
        ({}, "the paper names no limit"),
        ({"of": "model", "unlike": "so"}, "another model's; measured otherwise: so; the paper names no limit"),
    ],
)
def test_numbers_without_a_verdict_say_why(tmp_path: Path, claim: dict[str, Any], why: str) -> None:
    (verdict,) = group_of(tmp_path, methods=["window", "quantized"], **claim).judged()
    assert (verdict.outcome, verdict.finding, verdict.why) == (MEASURED, f"no verdict, {why}", why)
    ours, missing = verdict.ours
    assert ours.startswith("Ours: `window` at 10% and 25%; `quantized` at 25%: from 0.0 [")
    assert missing == "Not measured: `quantized` at 10%."
    (verdict,) = group_of(tmp_path / "none", methods=["h2o+merge"], **claim).judged()
    assert verdict.outcome is UNMEASURED


def test_a_claim_about_one_model_is_judged_on_that_model_only(tmp_path: Path) -> None:
    claim = {"says": "So it is.", "metric": "found", "methods": ["window"], "at_least": 0.9, "of": "model"}
    for models, outcome in ((["smollm2"], DIFFERS), (["another"], MEASURED)):
        paper = {**PAPER, "claims": [claim], "values": [], "models": models}
        (group,) = groups([filled(tmp_path / f"{outcome}.jsonl", EXPERIMENT.with_(paper=paper))])
        assert [verdict.outcome for verdict in group.judged()] == [outcome]


def test_two_methods_that_score_nothing_prove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither method is then better, and a score of nothing proves little where the full cache scores nothing too."""
    monkeypatch.setitem(FOUND_BY, "h2o", [0.0, 0.0])
    assert outcomes(tmp_path / "a", methods=["h2o"], than=["window"], budgets=["25%"], at_least=0.0) == {
        ("h2o less window", "25%"): OPEN
    }
    (verdict,) = group_of(tmp_path / "b", methods=["h2o"], than=["window"], budgets=["25%"], at_least=0.0).judged()
    assert verdict.ours == (
        "Undecided, because both score nothing: `h2o` less `window` at 25%: +0.0 [+0.0, +0.0] (N = 8).",
    )
    limits: dict[str, Any] = {"methods": ["window"], "budgets": ["25%"], "at_most": 0.9}
    assert set(outcomes(tmp_path / "c", **limits).values()) == {HOLDS}
    monkeypatch.setitem(FOUND_BY, "full", [0.0, 0.0])
    assert set(outcomes(tmp_path / "d", **limits).values()) == {OPEN}
    assert Metric("m", "m").floor == 0.0 and Metric("m", "m", "lower").floor == 1.0
    assert Metric("m", "KL", "lower", "number", least=0.0).floor is None


def test_the_papers_numbers_are_shown_and_not_judged(tmp_path: Path) -> None:
    values = [{"metric": "found", "value": 0.75, "method": "h2o", "budget": "25%"}]
    (group,) = groups([filled(tmp_path / "r.jsonl", EXPERIMENT.with_(paper={**PAPER, "claims": [], "values": values}))])
    assert isinstance(group, TaskGroup) and list(group.judged()) == []
    assert [line.paper[0].value for line in group.results if line.paper] == [0.75]


def test_without_a_paper_there_are_no_verdicts() -> None:
    assert list(TaskGroup(EXPERIMENT.with_(paper=None), "s", "m", ()).judged()) == []
    assert {verdict.outcome for verdict in TaskGroup(EXPERIMENT, "s", "m", ()).judged()} == {UNMEASURED}
