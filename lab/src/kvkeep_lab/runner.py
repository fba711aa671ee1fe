"""Running an experiment: only what is missing, one line of the store for each cell, written by one process."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from kvkeep import __version__
from kvkeep.errors import KvkeepError
from kvkeep.models.loading import Loaded, load
from kvkeep_lab.compare import Reference
from kvkeep_lab.experiment import Cell, Experiment, Inquiry, digest
from kvkeep_lab.store import Finding, Record, Row, Store
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.base import Metric, Outcome, Sample, Task
from kvkeep_lab.workers import ATTEMPTS, Here, Worker, local_workers, measured

Progress = Callable[[str, int, int], None]
"""Gets the cell in hand, the steps (samples) done and those in all, those of cells done earlier not counted."""


@dataclass
class Desk:
    """Where cells are measured: the model, the samples and the references that the last one needed stay for the next.

    sources: the files that prompts are made of. device: None is the loader's choice. tell: gets what takes long.
    workers: how many measure at the same time, with this one; each row says so.
    """

    experiment: Experiment | Inquiry
    sources: Sequence[Path]
    device: str | None = None
    tell: Callable[[str], None] = lambda text: None
    workers: int = 1
    _loaded: Loaded | None = None
    _asked: object = None  # what the samples and references are of
    _samples: list[Sample] = field(default_factory=list)
    _references: dict[tuple[int, ...], Reference] = field(default_factory=dict)

    def measure(self, cell: Cell, step: Callable[[int], None] = lambda done: None) -> Record:
        """Measure one cell; ``step`` gets the steps done. What goes wrong in it is the record's sentence. Raises as
        loading a model does, and KeyboardInterrupt."""
        loaded = self._model(cell.model)
        begun, start = datetime.now(UTC), time.perf_counter()
        found: dict[str, Any]
        try:
            found = {"status": "done", **self._found(loaded, cell, step)}
        except KvkeepError as error:
            found = {"status": "failed", "error": str(error)}
        except Exception as error:  # a fault of a method or a model must not end hours of work
            said = str(error).strip().splitlines()
            found = {"status": "failed", "error": f"{type(error).__name__}: {said[0] if said else 'no reason given'}"}
        return _record(
            self.experiment,
            cell,
            machine=_machine(loaded) | {"workers": self.workers},
            started=begun.isoformat(timespec="seconds"),
            seconds=_compact(time.perf_counter() - start),
            **found,
        )

    def _found(self, loaded: Loaded, cell: Cell, step: Callable[[int], None]) -> dict[str, Any]:
        """Return what is a record's own: of a study its data, of a task the figures of its samples."""
        if isinstance(self.experiment, Inquiry):
            study, steps = self.experiment.study, self.experiment.steps

            def progress(what: str, done: float, total: float) -> None:
                step(min(steps, round(steps * done / max(total, 1e-9))))

            return {"data": study.plain(study.measure(loaded, self.sources, cell.seed, progress))}
        outcomes: list[Outcome] = []
        subject = Subject(loaded, cell.method, cell.budget, self.experiment.chunk, self._references)
        for sample in self._prepared(loaded, self.experiment.task, cell):
            outcomes.append(_finite(self.experiment.task.measure(subject, sample)))
            step(len(outcomes))
        return {"versions": _versions() | subject.versions, **_figures(self.experiment.task.metrics, outcomes)}

    def _model(self, name: str) -> Loaded:
        if self._loaded is None or self._loaded.name != name:
            self._loaded, self._asked = None, None  # one model at a time
            self._references.clear()
            self._loaded = load(name, dtype=self.experiment.dtype, device=self.device, progress=self.tell)
        return self._loaded

    def _prepared(self, loaded: Loaded, task: Task, cell: Cell) -> list[Sample]:
        """Return the samples of a cell, and forget what only other cells need."""
        asked = (cell.model, cell.point, cell.seed)
        if asked != self._asked:
            self._references.clear()
            self._samples = task.prepare(loaded.tokenizer, self.sources, cell.point, cell.seed)
            self._asked = asked
        return self._samples


@dataclass(frozen=True)
class Tally:
    """What became of an experiment's cells. found: done before. elsewhere: another process has them in hand."""

    done: int = 0
    found: int = 0
    elsewhere: int = 0
    failed: tuple[Record, ...] = ()


def run(
    experiment: Experiment | Inquiry,
    store: Store,
    data: Path | None = None,
    *,
    only: Sequence[str] = (),
    fresh: bool = False,
    device: str | None = None,
    workers: int | None = None,
    ray: str | None = None,
    progress: Progress = lambda label, done, total: None,
    tell: Callable[[str], None] = lambda text: None,
) -> Tally:
    """Measure the cells that ``store`` does not have, those that failed earlier among them.

    only: measure these methods of a task (and nothing else). fresh: what was measured before counts for nothing; a
    report takes the newest. workers: processes that measure side by side; None is one, this one. ray: the address of a
    Ray cluster, ``auto`` or ``local``: workers run there, None being as many as it has GPUs or, without any, machines.
    An interrupt is raised on: what was measured until then is in the store. Raises UsageError for data that is missing,
    StoreError where nothing can be written.
    """
    sources = experiment.sources(data)
    cells = [cell for cell in experiment.cells(digest(sources)) if not only or cell.method in only]
    store.refresh()
    if cells:
        store.define(cells[0].setting, experiment.model_dump(mode="json"))
    before = store.done()
    todo = [cell for cell in cells if fresh or cell.key not in before]
    steps, finished, done, elsewhere = experiment.steps, 0, 0, 0
    failed: list[Record] = []

    def step(cell: Cell, count: int = 0) -> None:
        progress(cell.label, finished * steps + count, len(todo) * steps)

    @contextmanager
    def claim(cell: Cell) -> Iterator[bool]:
        step(cell)
        with store.claim(cell) as ours:
            store.refresh()
            yield ours and (fresh or cell.key not in store.done())

    crew = _workers(Desk(experiment, sources, device, tell), workers, ray, step) if todo else nullcontext([])
    with crew as hired, closing(measured(hired, todo, claim, partial(_lost, experiment))) as results:
        for cell, row in results:
            finished += 1
            step(cell)
            if row is None:  # by a process that runs beside this one
                elsewhere += 1
                continue
            store.append(row)
            done += row.status == "done"
            failed += [row] if row.status == "failed" else []
    return Tally(done, len(cells) - len(todo), elsewhere, tuple(failed))


def _record(experiment: Experiment | Inquiry, cell: Cell, **found: Any) -> Record:
    """Return what the store keeps of a cell."""
    common: dict[str, Any] = {
        "cell": cell.key,
        "setting": cell.setting,
        "experiment": experiment.name,
        "model": cell.model,
        "seed": cell.seed,
        "versions": _versions(),
        **found,
    }
    if isinstance(experiment, Inquiry):
        return Finding(**common)
    return Row(method=cell.method, budget=cell.budget, point=cell.point, **common)


def _workers(
    desk: Desk, count: int | None, ray: str | None, step: Callable[[Cell, int], None]
) -> AbstractContextManager[Sequence[Worker]]:
    if ray is not None:
        from kvkeep_lab.ray_workers import ray_workers

        return ray_workers(partial(Desk, desk.experiment), desk.sources, desk.device, ray, count)
    if count is not None and count > 1:
        return local_workers(partial(Desk, desk.experiment, desk.sources), desk.device, count)
    return nullcontext([Here(desk, step)])


def _lost(experiment: Experiment | Inquiry, cell: Cell) -> Record:
    """Return the record of a cell that workers die of."""
    return _record(
        experiment,
        cell,
        status="failed",
        error=f"{ATTEMPTS} workers died while they measured it; it may need more memory than they have.",
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _finite(outcome: Outcome) -> Outcome:
    for name, value in outcome.scores.items():
        if not math.isfinite(value):
            raise KvkeepError(f"The model gave {value} for {name}, which is no number to go by.")
    return outcome


def _figures(metrics: Sequence[Metric], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    costs = [outcome.cost for outcome in outcomes]
    largest = max(costs, key=lambda cost: cost.memory["resident_bytes"] + cost.memory["compressed_bytes"])
    return {
        "scores": {
            metric.name: [
                _compact(outcome.scores[metric.name]) for outcome in outcomes if metric.name in outcome.scores
            ]
            for metric in metrics
        },
        "prompt_tokens": [cost.prompt_tokens for cost in costs],
        "prefill_s": [_compact(cost.prefill_s) for cost in costs],
        "token_s": [None if cost.token_s is None else _compact(cost.token_s) for cost in costs],
        "memory": largest.memory,
        "exactness": largest.exactness,
        "entries": largest.entries,
    }


def _compact(value: float) -> float:
    return float(f"{value:.6g}")


def _versions() -> dict[str, str]:
    return {
        "kvkeep": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _machine(loaded: Loaded) -> dict[str, Any]:
    device = loaded.model.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
