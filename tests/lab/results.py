"""Stores of rows that are made up, for tests of what is made of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from kvkeep_lab.cell import Cell
from kvkeep_lab.experiment import Experiment
from kvkeep_lab.report import groups
from kvkeep_lab.report.chapter import Chapter
from kvkeep_lab.store import ResultFile, TaskRecord

PAPER = {
    "title": "A Paper",
    "where": "Fig. 7",
    "setting": "a large model, 16 bits",
    "claims": [
        "It always finds.",
        {"says": "Windows find most.", "metric": "found", "methods": ["window"], "at_least": 0.9},
        {
            "says": "Quantising finds all.",
            "metric": "found",
            "methods": ["quantized"],
            "budgets": ["25%"],
            "at_least": 1.0,
        },
        {"says": "Half is found.", "metric": "found", "methods": ["h2o"], "at_least": 0.45, "at_most": 0.55},
        {"says": "Llamas find all.", "metric": "found", "methods": ["h2o"], "at_least": 1.0, "of": "model"},
        {"says": "Merging finds.", "metric": "found", "methods": ["h2o+merge"], "at_least": 0.5},
    ],
    "values": [
        {"metric": "found", "value": 0.75, "method": "h2o", "budget": "25%", "note": "read off"},
        {"metric": "found", "value": 0.5, "method": "unheard-of"},
    ],
}
EXPERIMENT = Experiment.model_validate(
    {
        "name": "small", "title": "A small thing", "methods": ["h2o", "window", "quantized"], "budgets": ["10%", "25%"],
        "task": {"name": "needle", "length": [128, 256], "depth": [0, 50], "samples": 2}, "paper": PAPER,
    }
)  # fmt: skip


def small(model_folder: Path, **changes: object) -> Experiment:
    """An experiment that can be run: passages for a tiny model."""
    task = {"name": "match", "length": [76], "new": 4, "samples": 2}
    return EXPERIMENT.with_(**{"models": [str(model_folder)], "task": task, "paper": None, **changes})


FOUND = {"full": [1.0, 1.0], "h2o": [1.0, 0.0], "window": [0.0, 0.0], "quantized": [1.0, 1.0]}


def filled(
    path: Path,
    experiment: Experiment = EXPERIMENT,
    *,
    missing: str = "",
    machine: Callable[[Cell], dict[str, object]] = lambda cell: {"dtype": "float32"},
) -> ResultFile:
    """A store whose scores are made up: full finds all, h2o half, window nothing; quantized refuses 10 %. missing: a
    method that lacks one cell of each budget."""
    store, draw = ResultFile(path), random.Random(0)
    for number, cell in enumerate(experiment.cells("data")):
        if not number:
            store.define(cell.setting, experiment.model_dump(mode="json"))
        refused = cell.method == "quantized" and cell.budget == "10%"
        scores = {metric.name: FOUND[cell.method] for metric in experiment.task.metrics} | {
            "loglik": [-draw.random(), -draw.random()]
        }
        share = {None: 1.0, "10%": 0.1, "25%": 0.25}[cell.budget]
        if cell.method == missing and cell.point == {"length": 256, "depth": 50}:
            continue
        store.append(
            TaskRecord(
                cell=cell.key, setting=cell.setting, experiment="small", model=cell.model, method=cell.method,
                budget=cell.budget, seed=cell.seed, point=cell.point, status="failed" if refused else "done",
                error="The budget is too small." if refused else "",
                scores={} if refused else scores,
                prompt_tokens=[127, 256], prefill_s=[1.0, 2.0], token_s=[0.05, None],
                memory={"resident_bytes": int(8e6 * share), "compressed_bytes": int(1e5)}, exactness="lossy",
                entries=None if cell.budget is None else 64, versions={"kvkeep": "0"}, machine=machine(cell),
                started=f"2026-01-01T00:00:{number:02}+00:00", seconds=1.0,
            )
        )  # fmt: skip
    return stored(path)


def stored(path: Path) -> ResultFile:
    """A store as it lies there, read."""
    store = ResultFile(path)
    store.refresh()
    return store


def chapters(*stores: ResultFile) -> list[Chapter]:
    """What a report makes of stores."""
    return [group.chapter() for group in groups(stores)]
