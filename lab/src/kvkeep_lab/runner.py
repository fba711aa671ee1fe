"""Runs an experiment: finds missing cells, measures each, and counts the outcomes."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers

from kvkeep import __version__
from kvkeep.errors import KvkeepError
from kvkeep.models.loading import Loaded, load
from kvkeep.native.library import path
from kvkeep_lab.cell import Cell
from kvkeep_lab.experiment import Experiment, StudyExperiment, digest
from kvkeep_lab.provenance import commit, processor_name
from kvkeep_lab.reading import Readings
from kvkeep_lab.reference import ReferenceAnswer
from kvkeep_lab.store import Record, ResultFile, StudyRecord, TaskRecord
from kvkeep_lab.studies.base import Trial
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome
from kvkeep_lab.workers import ATTEMPTS, RunProgress, WorkerJob, work_in_processes


@dataclass
class Runner:
    """Measures cells. The model, samples and references of a cell are kept for the next cell with the same ones."""

    experiment: Experiment | StudyExperiment
    sources: Sequence[Path]
    """Source files of the prompts."""
    device: str | None = None
    """None for the loader's choice."""
    workers: int = 1
    """Number of workers that measure at the same time, including this one; stored in every record."""
    notify: Callable[[str], None] = lambda text: None
    """Called with a description of each slow operation."""
    _loaded: Loaded | None = None
    _prepared: object = None  # model, point and seed of the samples and references
    _samples: list[Sample] = field(default_factory=list)
    _references: dict[tuple[int, ...], ReferenceAnswer] = field(default_factory=dict)
    _readings: Readings = field(default_factory=dict)

    def measure(self, cell: Cell, step: Callable[[int], None] = lambda done: None) -> Record:
        """Measure one cell. ``step`` receives the number of finished steps. An error of the measurement is stored in
        the record. Raises the errors of loading a model, and KeyboardInterrupt."""
        loaded = self._model(cell.model)
        started, start = _now(), time.perf_counter()
        found: dict[str, Any]
        try:
            found = {"status": "done", **self._found(loaded, cell, step)}
        except KvkeepError as error:
            found = {"status": "failed", "error": str(error)}
        except Exception as error:  # a fault of a method or a model must not end the run
            lines = str(error).strip().splitlines()
            found = {"status": "failed", "error": f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"}
        machine = _machine(loaded) | {"workers": self.workers}
        seconds = _compact(time.perf_counter() - start)
        return self._record(cell, machine=machine, started=started, seconds=seconds, **found)

    def lost(self, cell: Cell) -> Record:
        """Return the record of a cell that repeatedly killed its process."""
        error = f"{ATTEMPTS} processes ended while they measured this cell; it may need more memory than they have."
        return self._record(cell, status="failed", error=error, started=_now())

    def _record(self, cell: Cell, **found: Any) -> Record:
        common: dict[str, Any] = {"cell": cell.key, "setting": cell.setting, "experiment": self.experiment.name}
        common |= {"model": cell.model, "seed": cell.seed, "versions": _versions(), **found}
        if isinstance(self.experiment, StudyExperiment):
            return StudyRecord(**common)
        return TaskRecord(method=cell.method, budget=cell.budget, point=cell.point, **common)

    def _found(self, loaded: Loaded, cell: Cell, step: Callable[[int], None]) -> dict[str, Any]:
        """Return the fields that are specific to the record of a study or a task."""
        if isinstance(self.experiment, StudyExperiment):
            study, steps = self.experiment.study, self.experiment.steps

            def progress(what: str, done: float, total: float) -> None:
                step(min(steps, round(steps * done / max(total, 1e-9))))

            return {"data": study.plain(study.measure(Trial(loaded, self.sources, cell.seed, progress)))}
        task, outcomes = self.experiment.task, list[TaskOutcome]()
        subject = Subject(loaded, cell.method, cell.budget, self.experiment.chunk, self._references, self._readings)
        for outcome in task.outcomes(subject, self._prepare(loaded, task, cell)):
            outcomes.append(_finite(outcome))
            step(len(outcomes))
        return {"versions": _versions() | subject.versions, **_numbers(task.metrics, outcomes)}

    def _model(self, name: str) -> Loaded:
        if self._loaded is None or self._loaded.name != name:
            self._loaded, self._prepared = None, None  # one model at a time
            self._forget()
            self._loaded = load(name, weights=self.experiment.weights, device=self.device, progress=self.notify)
        return self._loaded

    def _forget(self) -> None:
        """Drop what was kept of other cells' prompts."""
        self._references.clear()
        self._readings.clear()

    def _prepare(self, loaded: Loaded, task: Task, cell: Cell) -> list[Sample]:
        """Return the samples of a cell, and drop the data of other cells."""
        wanted = (cell.model, cell.point, cell.seed)
        if wanted != self._prepared:
            self._forget()
            self._samples = task.prepare(loaded.tokenizer, self.sources, cell.point, cell.seed)
            self._prepared = wanted
        return self._samples


@dataclass(frozen=True)
class Tally:
    """Counts of the cells of an experiment."""

    done: int = 0
    """Cells measured since the run began, by this or another run."""
    found: int = 0
    """Cells measured before this run."""
    elsewhere: int = 0
    """Cells that another run is measuring."""
    failed: tuple[Record, ...] = ()
    """Cells that failed since the run began, including those of a search."""
    searched: int = 0
    """Finished cells of the search, counted separately."""


def run(
    experiment: Experiment | StudyExperiment,
    store: ResultFile,
    data: Path | None = None,
    *,
    only: Sequence[str] = (),
    budgets: Sequence[str] = (),
    at: Mapping[str, Sequence[str]] = MappingProxyType({}),
    fresh: bool = False,
    device: str | None = None,
    workers: int | None = None,
    ray: str | None = None,
    progress: RunProgress = lambda label, done, total: None,
    notify: Callable[[str], None] = lambda text: None,
) -> Tally:
    """Measure the cells that ``store`` lacks, including those that failed before.

    An experiment with a search (``tune``) runs the search first, in the same store, and then the chosen methods.

    only: measure only these methods of a task. budgets: measure only these budgets, and methods without one. at:
    measure only these values of these axes, and only these seeds (``seed``). fresh: measure cells again that have
    results; a report uses the newest.
    workers: number of processes that measure at the same time; None: only this process. ray: address of a Ray cluster,
    ``auto`` or ``local``. The workers then run there; ``workers`` None means one per GPU, or per machine without GPUs.

    An interrupt is re-raised; the store has the results until then. Raises UsageError for missing data, StoreError if
    the store cannot be written, KvkeepError while another run is searching, and the errors of loading a model.
    """
    sources = tuple(experiment.sources(data))
    measure = partial(
        _run,
        store,
        budgets=budgets,
        fresh=fresh,
        device=device,
        workers=workers,
        ray=ray,
        progress=progress,
        notify=notify,
    )
    if not isinstance(experiment, Experiment) or experiment.tune is None:
        return measure(experiment, sources, only, at=at)
    passages, first = experiment.tune.passages(data), Tally()
    if tried := experiment.tune.tried(only or experiment.methods):
        first = measure(experiment.tuning(), passages, [experiment.baseline, *tried], at={})
    if first.elsewhere:
        raise KvkeepError(
            f"Another run is tuning the parameters of '{experiment.name}'; start this one again when it has finished."
        )
    store.refresh()
    experiment = experiment.tuned(store, digest(passages))
    chosen = (one for model in experiment.chosen.values() for at in model.values() for one in at.items())
    only = [*only, *(one for name, one in chosen if name in only)]
    then = measure(experiment, tuple(one for one in sources if one not in passages), only, at=at)
    return replace(then, failed=first.failed + then.failed, searched=first.done)


def _run(
    store: ResultFile,
    experiment: Experiment | StudyExperiment,
    sources: tuple[Path, ...],
    only: Sequence[str],
    *,
    budgets: Sequence[str],
    at: Mapping[str, Sequence[str]],
    fresh: bool,
    device: str | None,
    workers: int | None,
    ray: str | None,
    progress: RunProgress,
    notify: Callable[[str], None],
) -> Tally:
    """Measure the cells with ``sources`` that ``store`` lacks."""
    cells = [cell for cell in experiment.cells(digest(sources)) if not only or cell.method in only]
    cells = [cell for cell in cells if not budgets or cell.budget in (None, *budgets)]
    for axis, values in at.items():
        cells = [cell for cell in cells if cell.place[axis] in values]
    store.refresh()
    if cells:
        store.define(cells[0].setting, experiment.model_dump(mode="json"))
    before = store.done()
    todo = tuple(cell for cell in cells if fresh or cell.key not in before)
    since = ResultFile(store.path, store.end)
    job = WorkerJob(partial(Runner, experiment), sources, todo, experiment.steps, device, workers or 1)

    def poll() -> None:
        """Report the progress of other processes."""
        since.refresh()
        found = list(_latest(since, todo).values())
        progress(found[-1].label if found else "", len(found) * job.steps, len(todo) * job.steps)

    if ray is not None and todo:
        from kvkeep_lab.ray_workers import work_on_ray

        work_on_ray(replace(job, workers=workers or 0), since, ray, poll)
    elif job.workers > 1 and todo:
        work_in_processes(job, since, poll)
    else:
        job.work(since, progress=progress, notify=notify)
    since.refresh()
    found = _latest(since, todo)
    failed = tuple(record for record in found.values() if record.status == "failed")
    return Tally(len(found) - len(failed), len(cells) - len(todo), len(todo) - len(found), failed)


def _latest(store: ResultFile, cells: Sequence[Cell]) -> dict[str, Record]:
    """Return the newest record of each of ``cells``, in the order of the records."""
    keys = {cell.key for cell in cells}
    return {record.cell: record for record in store.records if record.cell in keys}


def _finite(outcome: TaskOutcome) -> TaskOutcome:
    for name, value in outcome.scores.items():
        if not math.isfinite(value):
            raise KvkeepError(f"The model gave {value} for {name}, which is not a finite number.")
    return outcome


def _numbers(metrics: Sequence[Metric], outcomes: Sequence[TaskOutcome]) -> dict[str, Any]:
    """Return the scores and costs of a cell's samples in the form of its record."""
    costs = [outcome.cost for outcome in outcomes]
    largest = max(costs, key=lambda cost: cost.held_bytes)
    names = [metric.name for metric in metrics]
    return {
        "scores": {name: [_compact(one.scores[name]) for one in outcomes if name in one.scores] for name in names},
        "depths": [] if all(one.depth is None for one in outcomes) else [one.depth for one in outcomes],
        "prompt_tokens": [cost.prompt_tokens for cost in costs],
        "prefill_s": [_compact(cost.prefill_s) for cost in costs],
        "token_s": [None if cost.token_s is None else _compact(cost.token_s) for cost in costs],
        "memory": largest.memory,
        "exactness": largest.exactness,
        "entries": largest.entries,
        "whole_bytes": largest.whole_bytes,
    }


def _compact(value: float) -> float:
    return float(f"{value:.6g}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    versions = {"kvkeep": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return versions | {"python": platform.python_version()} | ({} if (found := commit()) is None else {"commit": found})


def _machine(loaded: Loaded) -> dict[str, Any]:
    device = loaded.model.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": loaded.weights,
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processor": processor_name(),
        "path": path(),
    }
