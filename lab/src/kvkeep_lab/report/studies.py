"""What stores hold of studies, and the chapters about them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from kvkeep.errors import UsageError
from kvkeep_lab.experiment import Claim, Inquiry
from kvkeep_lab.intervals import Estimate, student
from kvkeep_lab.report.chapter import Chapter, Outcome, Picture, Verdict
from kvkeep_lab.report.groups import Group, grouped
from kvkeep_lab.report.telling import limit, listed, number, titled, told
from kvkeep_lab.report.verdicts import judge
from kvkeep_lab.store import Finding, Store
from kvkeep_lab.studies.base import Drawn
from kvkeep_lab.tables import Table


@dataclass(frozen=True)
class Studied(Group[Inquiry, Finding]):
    """A study: a record for each seed, seeds rising."""

    @cached_property
    def found(self) -> list[Any]:
        """What was found, by seed. Raises UsageError where this version cannot read it."""
        try:
            return [self.experiment.study.restored(one.data) for one in self.records if one.status == "done"]
        except ValueError as error:
            raise UsageError(
                f"The results of study '{self.experiment.name}' are of a version of kvkeep whose words are gone."
            ) from error

    @cached_property
    def values(self) -> dict[str, list[float]]:
        """The study's numbers by metric, one for each seed."""
        each = [self.experiment.study.scores(found) for found in self.found]
        names = [metric.name for metric in self.experiment.study.metrics]
        values = {name: [scores[name] for scores in each if name in scores] for name in names}
        return {name: numbers for name, numbers in values.items() if numbers}

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain types."""
        return {
            "experiment": self.experiment.model_dump(mode="json"),
            "setting": self.setting,
            "model": self.model,
            "values": self.values,
            "records": [record.model_dump(mode="json") for record in self.records],
        }


def studied(stores: Sequence[Store]) -> list[Studied]:
    """Return what ``stores`` hold (already read) of studies."""
    return [
        Studied(one.experiment, one.setting, one.model, tuple(sorted(one.records, key=lambda record: record.seed)))
        for one in grouped(stores, Inquiry, Finding)
    ]


def study_chapters(found: Sequence[Studied]) -> list[Chapter]:
    """Return a chapter for each."""
    return [_chapter(one) for one in found]


def _chapter(one: Studied) -> Chapter:
    study, claims = one.experiment.study, one.experiment.claims
    blocks: list[str | Picture] = [_setting(one), study.protocol]
    if one.values:
        blocks.append(_numbers(one).markdown())
    if one.found:
        first = one.found[0]
        blocks += [table.markdown() for table in study.tables(first)]
        if isinstance(study, Drawn):
            blocks.append(Picture(one.name, one.title, partial(study.draw, first, title=one.title)))
    return one.chapter(
        blocks,
        ours=_brief(one),
        verdicts=(_verdict(one, claim) for claim in claims if claim.metric is not None),
        undecided=[f"The paper says: {claim.says}" for claim in claims if claim.metric is None],
        missing=_missing(one),
    )


def _brief(one: Studied) -> str:
    fields = one.experiment.study.model_dump(mode="json")
    sizes = (f"{name.replace('_', ' ')} {_told(value)}" for name, value in fields.items())
    seeds = listed(str(record.seed) for record in one.records)
    return "; ".join([f"{one.model}, {one.dtypes}", *sizes, f"seed{'s' if len(one.records) > 1 else ''} {seeds}"])


def _told(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _setting(one: Studied) -> str:
    if len(one.found) > 1:
        return f"{one.origin} In brackets: Student's 95 % over seeds. Tables and figure are of the first."
    return one.origin


def _missing(one: Studied) -> Iterator[str]:
    yield from (f"Seed {record.seed}: {record.error}" for record in one.records if record.status == "failed")
    if seeds := [seed for seed in one.experiment.seeds if seed not in {record.seed for record in one.records}]:
        yield f"Not measured yet: seed{'s' if len(seeds) > 1 else ''} {listed(map(str, seeds))}."


def _numbers(one: Studied) -> Table:
    """Return ours beside the paper's."""
    paper = one.experiment.paper
    table = Table("The numbers that say most", ["", "ours", "the paper's"])
    for metric in one.experiment.study.metrics:
        theirs = [value for value in ([] if paper is None else paper.values) if value.metric == metric.name]
        if metric.name in one.values or theirs:
            ours = told(metric, student(one.values[metric.name])) if metric.name in one.values else "-"
            printed = (f"{number(metric, v.value)}{f' ({v.note})' if v.note else ''}" for v in theirs)
            table.rows.append([titled(metric), ours, "; ".join(printed)])
    return table


def _verdict(one: Studied, claim: Claim) -> Verdict:
    """Return what became of a claim: over seeds, or by the number itself where no seed and no run changes it."""
    study = one.experiment.study
    metric = next(metric for metric in study.metrics if metric.name == claim.metric)
    bounds = (("at least", claim.at_least), ("at most", claim.at_most))
    said = listed(f"{word} {limit(metric, bound, False)}" for word, bound in bounds if bound is not None)
    reading = f"{titled(metric)}, {said}"
    if not (values := one.values.get(metric.name, [])):
        return Verdict(claim.says, Outcome.UNMEASURED, reading=reading)
    if metric.name in study.certain:
        low = -math.inf if claim.at_least is None else claim.at_least
        high = math.inf if claim.at_most is None else claim.at_most
        outcome = Outcome.HOLDS if all(low <= value <= high for value in values) else Outcome.DIFFERS
        found = Estimate(values[0], values[0], values[0], 1)
    else:
        outcome, found = judge(values, claim.at_least, claim.at_most, scale=metric.scale)
    return Verdict(claim.says, outcome, (f"{titled(metric)}: {told(metric, found)}.",), found.n, reading)
