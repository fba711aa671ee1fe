"""Chapters of experiments that are studies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from kvkeep.errors import UsageError
from kvkeep_lab.experiment import StudyExperiment
from kvkeep_lab.paper import Claim
from kvkeep_lab.report.chapter import Picture
from kvkeep_lab.report.formatting import estimate_text, listed, number, titled
from kvkeep_lab.report.group import Group
from kvkeep_lab.report.verdicts import ClaimCase
from kvkeep_lab.statistics import student
from kvkeep_lab.store import StudyRecord
from kvkeep_lab.studies.base import Drawn
from kvkeep_lab.tables import Table


@dataclass(frozen=True)
class StudyGroup(Group):
    """The records of a study, one per seed, in the order of seeds."""

    experiment: StudyExperiment
    records: Sequence[StudyRecord]

    @cached_property
    def found(self) -> list[Any]:
        """The results by seed. Raises UsageError if this version cannot read them."""
        try:
            return [self.experiment.study.restored(one.data) for one in self.records if one.status == "done"]
        except ValueError as error:
            raise UsageError(
                f"The results of study '{self.experiment.name}' were written by another version of kvkeep, and "
                "this version cannot read them; measure again (--fresh)."
            ) from error

    @cached_property
    def values(self) -> dict[str, list[float]]:
        """The study's numbers by metric, one for each seed."""
        each = [self.experiment.study.scores(found) for found in self.found]
        names = [metric.name for metric in self.experiment.study.metrics]
        values = {name: [scores[name] for scores in each if name in scores] for name in names}
        return {name: numbers for name, numbers in values.items() if numbers}

    def as_dict(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("setting", "model", "values")}
        records = [record.model_dump(mode="json") for record in self.records]
        return {**facts, "records": records, "experiment": self.experiment.model_dump(mode="json")}

    @property
    def ours(self) -> str:
        fields = self.experiment.study.model_dump(mode="json")
        sizes = (f"{name.replace('_', ' ')} {_size(value)}" for name, value in fields.items())
        seeds = listed(str(record.seed) for record in self.records)
        return "; ".join(
            [f"{self.model}, {self.dtypes}", *sizes, f"seed{'s' if len(self.records) > 1 else ''} {seeds}"]
        )

    def blocks(self) -> Iterator[str | Picture]:
        study = self.experiment.study
        if self.values:
            yield self._numbers().markdown()
        if self.found:
            shown = study.joined(self.found)
            if len(self.found) > 1:
                seeds = "the first seed" if shown is self.found[0] else "all seeds"
                yield f"In brackets: Student's 95 % interval over seeds. Tables and figure show {seeds}."
            yield from (table.markdown() for table in study.tables(shown))
            if isinstance(study, Drawn):
                yield Picture(self.name, self.title, partial(study.draw, shown, title=self.title))
        yield from self.measuring(study.protocol)

    def _numbers(self) -> Table:
        paper = self.experiment.paper
        table = Table("The main numbers", ["", "ours", "the paper's"])
        for metric in self.experiment.study.metrics:
            theirs = [value for value in ([] if paper is None else paper.values) if value.metric == metric.name]
            if metric.name in self.values or theirs:
                ours = estimate_text(metric, student(self.values[metric.name])) if metric.name in self.values else "-"
                printed = (f"{number(metric, v.value)}{f' ({v.note})' if v.note else ''}" for v in theirs)
                table.rows.append([titled(metric), ours, "; ".join(printed)])
        return table

    def missing(self) -> Iterator[str]:
        yield from (f"Seed {record.seed}: {record.error}" for record in self.records if record.status == "failed")
        if seeds := [seed for seed in self.experiment.seeds if seed not in {record.seed for record in self.records}]:
            yield f"Not measured yet: seed{'s' if len(seeds) > 1 else ''} {listed(map(str, seeds))}."

    def cases(self, claim: Claim) -> list[ClaimCase]:
        name = str(claim.metric)
        return [ClaimCase(values=self.values.get(name, []), certain=name in self.experiment.study.certain)]


def _size(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
