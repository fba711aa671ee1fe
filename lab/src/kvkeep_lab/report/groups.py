"""Reads stores for a report: groups of records, unreadable experiments, and missing experiments."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kvkeep.errors import UsageError
from kvkeep_lab.experiment import Experiment, StudyExperiment, load_experiment, packaged, read_experiment
from kvkeep_lab.report.chapter import Chapter
from kvkeep_lab.report.studies import StudyGroup
from kvkeep_lab.report.tasks import TaskGroup
from kvkeep_lab.store import ResultFile, StudyRecord, TaskRecord


def groups(stores: Sequence[ResultFile]) -> list[TaskGroup | StudyGroup]:
    """Return the groups of ``stores`` (already read) by experiment, setting and model: tasks, then studies, by name,
    the latest first. Records that this version cannot read are left out; :func:`unread` lists them."""
    cells: dict[tuple[str, str], dict[str, TaskRecord | StudyRecord]] = {}
    for store in stores:
        for record in store.records:
            newest = cells.setdefault((record.setting, record.model), {})
            if record.status == "done" or newest.get(record.cell, record).status == "failed":
                newest[record.cell] = record
    definitions, found = _definitions(stores), list[TaskGroup | StudyGroup]()
    for (setting, model), newest in cells.items():
        try:
            experiment = _with_todays_paper(read_experiment(definitions[setting], "it", recorded=True))
        except (KeyError, UsageError):
            continue
        records = list(newest.values())
        if isinstance(experiment, Experiment):
            found.append(TaskGroup(experiment, setting, model, [one for one in records if isinstance(one, TaskRecord)]))
        else:
            studies = sorted((one for one in records if isinstance(one, StudyRecord)), key=lambda one: one.seed)
            found.append(StudyGroup(experiment, setting, model, studies))
    found.sort(key=lambda group: max(record.started for record in group.records), reverse=True)
    return sorted(found, key=lambda group: (isinstance(group, StudyGroup), group.experiment.name))


def unread(stores: Sequence[ResultFile]) -> list[Chapter]:
    """Return a chapter without blocks for each experiment in ``stores`` that this version cannot read."""
    wrong: dict[str, str] = {}
    for given in _definitions(stores).values():
        try:
            read_experiment(given, "what the results say of it", recorded=True)
        except UsageError as error:
            wrong[str(given.get("name", "?"))] = str(error)
    return [
        Chapter(
            f"Results of {name}",
            (),
            missing=(
                f"`{name}`, written by another version or with packages that are not installed, cannot be read: "
                f"{error}",
            ),
        )
        for name, error in wrong.items()
    ]


def unmeasured(names: Collection[str]) -> list[Chapter]:
    """Return a chapter without blocks for each experiment that comes with the library and is not among ``names``."""
    bare = [load_experiment(name) for name in packaged() if name not in names]
    return [
        Chapter(
            one.title,
            (),
            beside="" if one.paper is None else f"{one.paper.title}, {one.paper.where}",
            missing=(f"`kvkeep lab run {one.name}` has not been run.",),
        )
        for one in bare
    ]


def _definitions(stores: Sequence[ResultFile]) -> dict[str, dict[str, Any]]:
    return {one.setting: one.experiment for store in stores for one in store.definitions}


def _with_todays_paper(experiment: Experiment | StudyExperiment) -> Experiment | StudyExperiment:
    """Return an experiment with the current claims of the packaged experiment of its name, if both are compared with
    the same figure of a paper."""
    if experiment.name not in packaged() or experiment.paper is None:
        return experiment
    paper = load_experiment(experiment.name).paper
    if paper is not None and paper.where != experiment.paper.where:
        return experiment
    return experiment.model_copy(update={"paper": paper})
