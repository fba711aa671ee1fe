"""Tuning: separate passages, least KL, and rows with the chosen parameters."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from kvkeep_lab.experiment import Experiment, load_experiment
from kvkeep_lab.report import groups, markdown
from kvkeep_lab.report.tasks import TaskGroup
from kvkeep_lab.runner import run
from kvkeep_lab.store import ResultFile, TaskRecord
from kvkeep_lab.tuning import Tuning
from results import small, stored

from kvkeep.errors import UsageError

OTHERS = {"h2o": ["h2o:recent=0.1", "h2o:recent=0.9"], "quantized": ["quantized:2,exact=1"]}
TUNE = {"candidates": OTHERS, "length": 156, "new": 4, "samples": 2, "files": 1}


@pytest.fixture
def data(tmp_path: Path, words: str) -> Path:
    (tmp_path / "haystack").mkdir()
    for number in range(3):
        text = ". ".join([" ".join(words.split()[number * 40 :])] * 3)
        (tmp_path / "haystack" / f"{number}.txt").write_text(text)
    return tmp_path


@pytest.fixture
def experiment(model_folder: Path) -> Experiment:
    methods = ["h2o", "quantized", "window", "kv-direct"]
    paper: dict[str, Any] = {"title": "T", "where": "W", "setting": "S"}
    claim = {"says": "So.", "metric": "match", "methods": ["h2o"], "than": ["window"], "at_least": 0.0}
    task = {"name": "match", "length": [156], "new": 4, "samples": 2}
    paper |= {"claims": [claim]}
    return small(model_folder, methods=methods, budgets=["50%"], task=task, tune=TUNE, paper=paper)


def record(method: str, kl: float, **changes: Any) -> TaskRecord:
    common = {"cell": method, "setting": "s", "experiment": "e", "model": "m", "seed": 0, "point": {}, "status": "done"}
    return TaskRecord.model_validate(common | {"method": method, "budget": "25%", "scores": {"kl": [kl, kl]}} | changes)


def test_tuning_chooses_the_candidate_of_least_kl_for_each_method_and_budget() -> None:
    tuning = Tuning.model_validate(TUNE)
    records = [
        record("h2o", 0.3), record("h2o:recent=0.1", 0.1), record("h2o:recent=0.9", 0.2),
        record("h2o", 0.01, budget="50%"), record("h2o:recent=0.1", 0.1, budget="50%"),
        record("h2o", 0.3, model="n"), record("h2o:recent=0.9", 0.0, status="failed", scores={}, model="n"),
        record("quantized", 0.0, status="failed", scores={}),
    ]  # fmt: skip
    assert tuning.chosen(records, ["h2o", "quantized", "window"]) == {
        "m": {"25%": {"h2o": "h2o:recent=0.1"}, "50%": {"h2o": "h2o"}}, "n": {"25%": {"h2o": "h2o"}},
    }  # fmt: skip
    again = tuning.chosen([*records, record("h2o:recent=0.1", 9.0)], ["h2o"])  # the newest counts
    assert again["m"]["25%"] == {"h2o": "h2o:recent=0.9"}
    assert tuning.tried(["window", "h2o"]) == ["h2o", *OTHERS["h2o"]]


def test_parameters_are_chosen_on_other_passages_than_the_judged_ones(
    experiment: Experiment, data: Path, tmp_path: Path
) -> None:
    store = ResultFile(tmp_path / "r.jsonl")
    tally = run(experiment, store, data)
    rows = [row for row in stored(store.path).records if isinstance(row, TaskRecord)]
    search, judged = ([row for row in rows if row.experiment == name] for name in ("small-tuning", "small"))
    assert {row.method for row in search} == {"full", "h2o", "quantized", *OTHERS["h2o"], *OTHERS["quantized"]}
    assert (tally.searched, tally.done, len(judged)) == (len(search), len(judged), 5)
    for name, others in OTHERS.items():
        means = {row.method: fmean(row.scores["kl"]) for row in search if row.method in (name, *others)}
        best = min(means, key=means.__getitem__)
        assert [row.method for row in judged if row.method.startswith(name)] == [best]
        # The same method on the judged passages is another number: they are other passages.
        assert next(row.scores["kl"] for row in judged if row.method == best) not in [
            row.scores["kl"] for row in search
        ]
    again = run(experiment, ResultFile(store.path), data)
    assert (again.searched, again.done, again.found) == (0, 0, 5)


def test_the_report_names_the_chosen_parameters(experiment: Experiment, data: Path, tmp_path: Path) -> None:
    run(experiment, ResultFile(tmp_path / "r.jsonl"), data)
    found = groups([stored(tmp_path / "r.jsonl")])
    assert [group.experiment.name for group in found] == ["small", "small-tuning"]
    group = found[0]
    assert isinstance(group, TaskGroup)
    chosen = group.experiment.choice("h2o", group.model, "50%")
    text = markdown([group.chapter()])
    assert f"`h2o` (3 tried): `{chosen}` at 50%; `quantized` (2 tried): " in text
    assert f"| `{chosen}` | 50% |" in text
    assert "Not measured yet" not in markdown([one.chapter() for one in found])
    (case,) = group.cases(group.experiment.claims[0])
    assert case.name == f"`{chosen}` less `window`" and len(case.values) == 2


def test_the_search_covers_only_the_selected_methods(experiment: Experiment, data: Path, tmp_path: Path) -> None:
    store = ResultFile(tmp_path / "r.jsonl")
    assert run(experiment, store, data, only=["window"]).searched == 0
    tally = run(experiment, ResultFile(store.path), data, only=["h2o"])
    assert (tally.searched, tally.done) == (4, 1)
    assert run(experiment, ResultFile(store.path), data).searched == 2


def test_a_failing_candidate_is_recorded_and_not_chosen(experiment: Experiment, data: Path, tmp_path: Path) -> None:
    large = "quantized:8,exact=4096"  # more than the budget
    tune = {**TUNE, "candidates": {"quantized": [large]}}
    store = ResultFile(tmp_path / "r.jsonl")
    tally = run(experiment.with_(tune=tune), store, data, only=["quantized"])
    assert [(one.experiment, one.method) for one in tally.failed] == [("small-tuning", large)]
    assert tally.done == 1 and stored(store.path).records[-1].method == "quantized"


def test_impossible_tunings_are_refused(experiment: Experiment, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'full' takes no budget"):
        experiment.with_(tune={**TUNE, "candidates": {"h2o": ["full"]}})
    with pytest.raises(UsageError, match="candidates for 'snapkv'"):
        experiment.with_(tune={**TUNE, "candidates": {"snapkv": ["snapkv:window=4"]}})
    with pytest.raises(UsageError, match="sets 3 text files aside, and there are only 3"):
        run(experiment.with_(tune={**TUNE, "files": 3}), ResultFile(tmp_path / "r.jsonl"), data)


def test_the_packaged_search_gives_kvkeep_no_more_candidates_than_rivals() -> None:
    experiment = load_experiment("bounded")
    assert isinstance(experiment, Experiment) and experiment.tune is not None and experiment.weights == "bfloat16"
    counts = {name: len(experiment.tune.tried([name])) for name in experiment.tune.candidates}
    assert max(counts.values()) == counts["revive"] == counts["h2o+quantize:4"]
    smoke = experiment.smoked()
    assert isinstance(smoke, Experiment) and smoke.tune is not None
    assert set(smoke.tune.candidates) == {"snapkv", "revive"}
