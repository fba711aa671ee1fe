"""What stores hold, by what belongs together: one experiment, of one setting (sizes, data, dtype), on one model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvkeep.errors import UsageError
from kvkeep_lab.experiment import Experiment, Inquiry, load_experiment, packaged, read_experiment
from kvkeep_lab.report.chapter import Chapter, Picture, Verdict
from kvkeep_lab.store import Finding, Row, Store

OutlineT = TypeVar("OutlineT", bound=Experiment | Inquiry)
RecordT = TypeVar("RecordT", bound=Row | Finding)


@dataclass(frozen=True)
class Group(Generic[OutlineT, RecordT]):
    """One experiment's records: the newest of each cell; where one was measured, a later failure counts for nothing."""

    experiment: OutlineT
    setting: str
    model: str
    records: tuple[RecordT, ...]

    @property
    def name(self) -> str:
        """What files about it are called."""
        model = Path(self.model).name.removesuffix(".gguf")
        return f"{self.experiment.name}-{model}-{self.setting[:6]}"

    @property
    def versions(self) -> list[dict[str, str]]:
        """All that took part."""
        return _different(record.versions for record in self.records)

    @property
    def machines(self) -> list[dict[str, Any]]:
        """All that took part; rows that do not say how many processes measured side by side are of one."""
        return _different({"workers": 1} | record.machine for record in self.records)

    @property
    def dtypes(self) -> str:
        """The precisions of all machines, as a person reads them."""
        return " and ".join(sorted({str(machine.get("dtype")) for machine in self.machines}))

    @property
    def title(self) -> str:
        """What its chapter is called."""
        return f"{self.experiment.title}: {self.model}"

    @property
    def origin(self) -> str:
        """The experiment, machines and versions, as a sentence of Markdown."""
        machines = "; ".join(
            f"{one.get('device')}, {one.get('dtype')}, {one.get('platform')}, threads {one.get('threads')}"
            + (f", {one['workers']} processes" if one["workers"] > 1 else "")
            for one in self.machines
        )
        versions = "; ".join(", ".join(f"{name} {version}" for name, version in one.items()) for one in self.versions)
        return f"Experiment `{self.experiment.name}`: {machines}. {versions}."

    def chapter(
        self,
        blocks: Iterable[str | Picture],
        *,
        ours: str,
        verdicts: Iterable[Verdict],
        undecided: Sequence[str],
        missing: Iterable[str],
    ) -> Chapter:
        """Return the chapter. ours: beside the paper's own setting. undecided: what the paper says, and no number here
        decides. The rest: as :class:`~kvkeep_lab.report.chapter.Chapter` has it."""
        paper = self.experiment.paper
        items = "\n".join(f"* {sentence}" for sentence in undecided)
        last = [f"What no number here decides:\n\n{items}"] if undecided else []
        return Chapter(
            self.title,
            (*blocks, *last),
            beside="" if paper is None else f"{paper.title}, {paper.where}",
            theirs="" if paper is None else paper.setting,
            ours=ours,
            verdicts=tuple(verdicts),
            missing=tuple(missing),
        )


def grouped(stores: Sequence[Store], kind: type[OutlineT], record: type[RecordT]) -> list[Group[OutlineT, RecordT]]:
    """Return what ``stores`` (already read) hold of experiments of a kind, by name, the latest first. What this version
    cannot read is left out: :func:`unread` names it."""
    cells: dict[tuple[str, str], dict[str, RecordT]] = {}
    for store in stores:
        for one in (*store.rows, *store.findings):
            if isinstance(one, record):
                group = cells.setdefault((one.setting, one.model), {})
                if one.status == "done" or group.get(one.cell, one).status == "failed":
                    group[one.cell] = one
    definitions = _definitions(stores)
    made: list[Group[OutlineT, RecordT]] = []
    for (setting, model), group in cells.items():
        try:
            experiment = _as_read_today(read_experiment(definitions[setting], "it"))
        except (KeyError, UsageError):
            continue
        if isinstance(experiment, kind):
            made.append(Group(experiment, setting, model, tuple(group.values())))
    made.sort(key=lambda one: max(record.started for record in one.records), reverse=True)
    return sorted(made, key=lambda one: one.experiment.name)


def unread(stores: Sequence[Store]) -> list[Chapter]:
    """Return a chapter without blocks for each experiment that this version cannot read, as other versions had other
    words."""
    wrong: dict[str, str] = {}
    for given in _definitions(stores).values():
        try:
            read_experiment(given, "what the results say of it")
        except UsageError as error:
            wrong[str(given.get("name", "?"))] = str(error)
    return [
        Chapter(f"Results of {name}", (), missing=(f"`{name}`, measured by another version, cannot be read: {error}",))
        for name, error in wrong.items()
    ]


def _definitions(stores: Sequence[Store]) -> dict[str, dict[str, Any]]:
    return {one.setting: one.experiment for store in stores for one in store.definitions}


def _as_read_today(experiment: Experiment | Inquiry) -> Experiment | Inquiry:
    """Return an experiment as it was, but for what the paper says: of one that comes with the library, and still stands
    beside the same figure, that is as it is read today."""
    paper = load_experiment(experiment.name).paper if experiment.name in packaged() else None
    if paper is None or experiment.paper is None or paper.where != experiment.paper.where:
        return experiment
    return experiment.model_copy(update={"paper": paper})


def _different(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({json.dumps(one, sort_keys=True): one for one in found}.values())
