"""Runs of experiments: missing cells only, each once, and a kill loses the current cell only."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked import exit_codes
from kvkeep_lab.cell import Cell
from kvkeep_lab.experiment import Experiment
from kvkeep_lab.runner import Runner, run
from kvkeep_lab.store import ResultFile, TaskRecord
from results import small, stored

from kvkeep.errors import BudgetError, ModelError


@pytest.fixture
def data(tmp_path: Path, words: str) -> Path:
    (tmp_path / "haystack").mkdir()
    (tmp_path / "haystack" / "text.txt").write_text(". ".join([words] * 3))
    return tmp_path


@pytest.fixture
def experiment(model_folder: Path) -> Experiment:
    return small(model_folder, methods=["h2o", "kv-direct", "static"], budgets=["25%", "24"])


def test_a_row_records_scores_costs_and_versions(experiment: Experiment, data: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    tally = run(experiment, ResultFile(tmp_path / "r.jsonl"), data, progress=lambda *given: steps.append(given))
    assert (tally.done, tally.found, tally.elsewhere, len(tally.failed)) == (5, 0, 0, 2)
    store = stored(tmp_path / "r.jsonl")
    rows = {(row.method, row.budget): row for row in store.records}
    assert list(rows) == [
        ("full", None), ("h2o", "25%"), ("kv-direct", "25%"), ("static", "25%"),
        ("h2o", "24"), ("kv-direct", "24"), ("static", "24"),
    ]  # fmt: skip
    row = rows["kv-direct", "24"]
    assert row.scores["match"] == [1.0, 1.0] and len(row.prefill_s) == len(row.token_s) == 2
    assert (row.entries, row.exactness, row.prompt_tokens) == (24, "exact", [76, 76])
    assert row.held_bytes > 0 and row.memory.checkpoint_bytes["disk"] > 0 and row.seconds > 0
    assert set(row.versions) >= {"kvkeep", "torch", "transformers", "python"} and row.machine["dtype"] == "float32"
    assert row.started.endswith("+00:00") and row.point == {"length": 76} and row.seed == 0
    failed = rows["static", "25%"]
    assert failed.status == "failed" and failed.error.endswith(".") and not failed.scores
    assert store.definitions[0].experiment == experiment.model_dump(mode="json")
    assert steps[0][1:] == (0, 14) and steps[-1] == ("static 24 (length 76)", 14, 14)


def test_a_second_run_measures_missing_and_failed_cells_only(
    experiment: Experiment, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    first = run(experiment.with_(methods=["h2o"]), ResultFile(path), data, only=["h2o"])
    assert (first.done, first.found) == (2, 0)
    second = run(experiment, ResultFile(path), data)
    assert (second.done, second.found, len(second.failed)) == (3, 2, 2)
    third = run(experiment, ResultFile(path), data)
    assert (third.done, third.found, len(third.failed)) == (0, 5, 2)
    fresh = run(experiment, ResultFile(path), data, only=["h2o"], fresh=True)
    assert (fresh.done, fresh.found) == (2, 0)
    again = [(row.method, row.scores) for row in stored(path).records if row.method == "h2o"]
    assert again[:2] == again[2:]  # the same numbers again


@pytest.mark.slow
def test_two_workers_measure_the_same_as_one(experiment: Experiment, data: Path, tmp_path: Path) -> None:
    steps: list[int] = []
    found = []
    for workers in (1, 2):
        store = ResultFile(tmp_path / f"{workers}.jsonl")
        tally = run(experiment, store, data, workers=workers, progress=lambda label, done, total: steps.append(done))
        rows = stored(store.path).records
        assert tally.done == 5 and len(rows) == 7 and {row.machine["workers"] for row in rows} == {workers}
        found.append({row.cell: (row.scores, row.error) for row in rows})
    assert found[0] == found[1]
    half = steps.index(14) + 1
    assert all(part == sorted(part) and (part[0], part[-1]) == (0, 14) for part in (steps[:half], steps[half:]))


def test_changed_data_make_new_cells(experiment: Experiment, data: Path, tmp_path: Path, words: str) -> None:
    path = tmp_path / "r.jsonl"
    run(experiment, ResultFile(path), data, only=["full"])
    (data / "haystack" / "more.txt").write_text(words)
    assert run(experiment, ResultFile(path), data, only=["full"]).done == 1


def test_an_error_is_recorded_in_its_cell_and_other_cells_run(
    experiment: Experiment, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = type(experiment.task).measure

    def faulty(task: Any, subject: Any, sample: Any) -> Any:
        if subject.method == "h2o":
            raise BudgetError("Too small.") if subject.budget == "24" else ZeroDivisionError("by\nzero")
        found = honest(task, subject, sample)
        if subject.method == "kv-direct":
            found.scores["kl"] = float("nan")
        return found

    monkeypatch.setattr(type(experiment.task), "measure", faulty)
    tally = run(experiment.with_(methods=["h2o", "kv-direct"]), ResultFile(tmp_path / "r.jsonl"), data)
    assert tally.done == 1
    assert [row.error for row in tally.failed] == [
        "ZeroDivisionError: by",
        "The model gave nan for kl, which is not a finite number.",
        "Too small.",
        "The model gave nan for kl, which is not a finite number.",
    ]


def test_a_missing_model_is_reported_at_once(experiment: Experiment, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        run(experiment.with_(models=["./nowhere"]), ResultFile(tmp_path / "r.jsonl"), data)
    assert stored(tmp_path / "r.jsonl").records == []


def made_up(runner: Runner, cell: Cell, step: Any) -> TaskRecord:
    common = {"setting": cell.setting, "experiment": "small", "model": cell.model, "method": cell.method}
    return TaskRecord(cell=cell.key, **common, budget=cell.budget, seed=0, point=cell.point, status="done")


def test_two_simultaneous_runs_measure_each_cell_once(
    experiment: Experiment, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(runner: Runner, cell: Cell, step: Any) -> TaskRecord:
        time.sleep(0.05)
        return made_up(runner, cell, step)

    monkeypatch.setattr(Runner, "measure", slow)
    path, larger = tmp_path / "r.jsonl", experiment.with_(seeds=[0, 1, 2])
    assert exit_codes(*(partial(run, larger, ResultFile(path), data) for _ in range(2))) == [0, 0]
    found = stored(path)
    assert len(found.records) == len(found.done()) == 21 and found.torn == 0


def test_a_killed_run_loses_its_current_cell_and_three_kills_fail_the_cell(
    experiment: Experiment, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kills(runner: Runner, cell: Cell, step: Any) -> TaskRecord:
        if cell.method == "h2o":
            os.kill(os.getpid(), signal.SIGKILL)
        return made_up(runner, cell, step)

    monkeypatch.setattr(Runner, "measure", kills)
    path, two = tmp_path / "r.jsonl", experiment.with_(budgets=["24"])
    for _ in range(3):
        assert exit_codes(partial(run, two, ResultFile(path), data)) == [-signal.SIGKILL]
    tally = run(two, ResultFile(path), data)
    assert (tally.done, tally.found) == (2, 1)
    assert [record.error for record in tally.failed] == [
        "3 processes ended while they measured this cell; it may need more memory than they have."
    ]
    assert [left.name for left in tmp_path.glob("r.jsonl.*")] == ["r.jsonl.lock"]


def test_an_interrupt_is_reraised_and_keeps_the_finished_cells(
    experiment: Experiment, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(runner: Runner, cell: Cell, step: Any) -> TaskRecord:
        if cell.method == "kv-direct":
            raise KeyboardInterrupt
        return made_up(runner, cell, step)

    monkeypatch.setattr(Runner, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, ResultFile(tmp_path / "r.jsonl"), data)
    assert len(stored(tmp_path / "r.jsonl").records) == 2
    assert [path.name for path in tmp_path.glob("*.lock")] == ["r.jsonl.lock"]
