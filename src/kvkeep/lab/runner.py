"""Running an experiment: only what is missing, one line of the store for each cell."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from kvkeep import __version__
from kvkeep.errors import KvkeepError
from kvkeep.lab.compare import Reference
from kvkeep.lab.experiment import Cell, Experiment, digest
from kvkeep.lab.store import Row, Store
from kvkeep.lab.subject import Subject
from kvkeep.lab.tasks.base import Metric, Outcome, Sample
from kvkeep.models.loading import Loaded, load

Progress = Callable[[str, int, int], None]
"""Gets the cell in hand, the samples done and the samples in all, those of cells done earlier not counted."""


@dataclass
class Desk:
    """Where cells are measured: the model, the samples and the references that the last one needed stay for the next.

    sources: the files that prompts are made of. device: None is the loader's choice. tell: gets what takes long.
    """

    experiment: Experiment
    sources: Sequence[Path]
    device: str | None = None
    tell: Callable[[str], None] = lambda text: None
    _loaded: Loaded | None = None
    _asked: object = None  # what the samples and references are of
    _samples: list[Sample] = field(default_factory=list)
    _references: dict[tuple[int, ...], Reference] = field(default_factory=dict)

    def measure(self, cell: Cell, step: Callable[[int], None] = lambda done: None) -> Row:
        """Measure one cell; ``step`` gets the samples done. What goes wrong in it is the row's sentence. Raises as
        loading a model does, and KeyboardInterrupt."""
        loaded = self._model(cell.model)
        begun, start = datetime.now(UTC), time.perf_counter()
        found: dict[str, Any] = {"status": "done"}
        outcomes: list[Outcome] = []
        subject = Subject(loaded, cell.method, cell.budget, self.experiment.chunk, self._references)
        try:
            for sample in self._prepared(loaded, cell):
                outcomes.append(_finite(self.experiment.task.measure(subject, sample)))
                step(len(outcomes))
            found |= _figures(self.experiment.task.metrics, outcomes)
        except KvkeepError as error:
            found = {"status": "failed", "error": str(error)}
        except Exception as error:  # a fault of a method or a model must not end hours of work
            said = str(error).strip().splitlines()
            found = {"status": "failed", "error": f"{type(error).__name__}: {said[0] if said else 'no reason given'}"}
        return Row(
            cell=cell.key,
            setting=cell.setting,
            experiment=self.experiment.name,
            model=cell.model,
            method=cell.method,
            budget=cell.budget,
            seed=cell.seed,
            point=cell.point,
            versions=_versions() | subject.versions,
            machine=_machine(loaded),
            started=begun.isoformat(timespec="seconds"),
            seconds=_compact(time.perf_counter() - start),
            **found,
        )

    def _model(self, name: str) -> Loaded:
        if self._loaded is None or self._loaded.name != name:
            self._loaded, self._asked = None, None  # one model at a time
            self._references.clear()
            self._loaded = load(name, dtype=self.experiment.dtype, device=self.device, progress=self.tell)
        return self._loaded

    def _prepared(self, loaded: Loaded, cell: Cell) -> list[Sample]:
        """Return the samples of a cell, and forget what only other cells need."""
        asked = (cell.model, cell.point, cell.seed)
        if asked != self._asked:
            self._references.clear()
            self._samples = self.experiment.task.prepare(loaded.tokenizer, self.sources, cell.point, cell.seed)
            self._asked = asked
        return self._samples


@dataclass(frozen=True)
class Tally:
    """What became of an experiment's cells. found: done before. elsewhere: another process has them in hand."""

    done: int = 0
    found: int = 0
    elsewhere: int = 0
    failed: tuple[Row, ...] = ()


def run(
    experiment: Experiment,
    store: Store,
    data: Path | None = None,
    *,
    only: Sequence[str] = (),
    fresh: bool = False,
    device: str | None = None,
    progress: Progress = lambda label, done, total: None,
    tell: Callable[[str], None] = lambda text: None,
) -> Tally:
    """Measure the cells that ``store`` does not have, those that failed earlier among them.

    only: measure these methods (and nothing else). fresh: what was measured before counts for nothing; a report takes
    the newest. An interrupt is raised on: what was measured until then is in the store. Raises UsageError for data that
    is missing, StoreError where nothing can be written.
    """
    sources = experiment.sources(data)
    cells = [cell for cell in experiment.cells(digest(sources)) if not only or cell.method in only]
    store.refresh()
    if cells:
        store.define(cells[0].setting, experiment.model_dump(mode="json"))
    before = store.done()
    todo = [cell for cell in cells if fresh or cell.key not in before]
    desk, samples = Desk(experiment, sources, device, tell), experiment.task.samples
    done, elsewhere, failed = 0, 0, []
    for number, cell in enumerate(todo):

        def step(count: int, label: str = cell.label, first: int = number * samples) -> None:
            progress(label, first + count, len(todo) * samples)

        step(0)
        with store.claim(cell) as ours:
            store.refresh()
            if not ours or (not fresh and cell.key in store.done()):  # by a process that runs beside this one
                elsewhere += 1
                continue
            row = desk.measure(cell, step)
            store.append(row)
        done += row.status == "done"
        failed += [row] if row.status == "failed" else []
    return Tally(done, len(cells) - len(todo), elsewhere, tuple(failed))


def _finite(outcome: Outcome) -> Outcome:
    for name, value in outcome.scores.items():
        if not math.isfinite(value):
            raise KvkeepError(f"The model gave {value} for {name}, which is no number to go by.")
    return outcome


def _figures(metrics: Sequence[Metric], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    costs = [outcome.cost for outcome in outcomes]
    largest = max(costs, key=lambda cost: cost.memory["resident_bytes"] + cost.memory["compressed_bytes"])
    return {
        "scores": {metric.name: [_compact(outcome.scores[metric.name]) for outcome in outcomes] for metric in metrics},
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
