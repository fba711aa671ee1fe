"""The records of one experiment, in one setting (sizes, data, dtype), on one model, and their chapter."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.models.embedded import EMBEDDED
from kvkeep_lab.experiment import ExperimentBase
from kvkeep_lab.paper import Claim
from kvkeep_lab.report.chapter import Chapter, Picture, Verdict
from kvkeep_lab.report.verdicts import ClaimCase, verdict
from kvkeep_lab.store import Record
from kvkeep_lab.tasks.base import Metric


@dataclass(frozen=True)
class Group(ABC):
    """The records of one experiment in one setting on one model."""

    experiment: ExperimentBase
    setting: str
    model: str
    records: Sequence[Record]
    """The newest record of each cell. A failure after a successful measurement is ignored."""

    @property
    def name(self) -> str:
        """Base name of its files."""
        model = Path(self.model).name.removesuffix(".gguf")
        return f"{self.experiment.name}-{model}-{self.setting[:6]}"

    @property
    def title(self) -> str:
        return f"{self.experiment.title}: {self.model}"

    @property
    def versions(self) -> list[dict[str, str]]:
        """Versions with which cells were measured."""
        return _different(record.versions for record in self.records)

    @property
    def machines(self) -> list[dict[str, Any]]:
        """Machines on which cells were measured. Records without a number of processes count as measured by one."""
        return _different({"workers": 1} | record.machine for record in self.records)

    @property
    def dtypes(self) -> str:
        """Precisions on all machines, with the quantised source file of the weights if there is one."""
        found = sorted({str(machine.get("dtype")) for machine in self.machines})
        file = EMBEDDED[self.model].file if self.model in EMBEDDED and found != ["auto"] else ""
        return " and ".join(found) + (f" (dequantised from {file})" if file else "")

    @property
    def origin(self) -> str:
        """The experiment, machines and versions, as a sentence of Markdown."""
        machines = "; ".join(
            f"{one.get('device')}, {one.get('dtype')}, {one.get('platform')}, threads {one.get('threads')}"
            + (f", {one['processor']}, path {one['path']}" if "path" in one else "")
            + (f", {one['workers']} processes" if one["workers"] > 1 else "")
            for one in self.machines
        )
        versions = "; ".join(", ".join(f"{name} {version}" for name, version in one.items()) for one in self.versions)
        return f"Experiment `{self.experiment.name}`: {machines}. {versions}."

    def measuring(self, *said: str) -> Iterator[str]:
        """Yield the conditions of the numbers: experiment, machines and versions, and the sentences ``said`` about the
        method."""
        yield "### How it was measured"
        yield from (self.origin, *said)

    @property
    @abstractmethod
    def ours(self) -> str:
        """Model, precision and sizes, for comparison with the paper's setting."""

    @abstractmethod
    def blocks(self) -> Iterator[str | Picture]:
        """Yield Markdown and pictures."""

    @abstractmethod
    def missing(self) -> Iterator[str]:
        """Yield a sentence for each missing measurement, with its reason."""

    @abstractmethod
    def cases(self, claim: Claim) -> list[ClaimCase]:
        """Return the cases of a claim with a metric, with their measurements."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return all contents as plain types."""

    def undecided(self) -> Iterator[str]:
        """Yield a sentence for each of the paper's claims without a metric."""
        yield from (f"The paper says: {claim.says}" for claim in self.experiment.claims if claim.metric is None)

    def judged(self) -> Iterator[Verdict]:
        """Yield the verdict on each claim with a metric."""
        if (paper := self.experiment.paper) is None:
            return
        for claim in paper.claims:
            if claim.metric is not None:
                why = paper.no_verdict(claim, self.model)
                yield verdict(claim, self.metric(claim.metric), self.cases(claim), why)

    def metric(self, name: str) -> Metric:
        """Return a metric of the task or study."""
        return next(metric for metric in self.experiment.subject.metrics if metric.name == name)

    def chapter(self) -> Chapter:
        paper, blocks = self.experiment.paper, list(self.blocks())
        if undecided := list(self.undecided()):
            blocks.append(
                "Claims that no number here decides:\n\n" + "\n".join(f"* {sentence}" for sentence in undecided)
            )
        return Chapter(
            self.title,
            tuple(blocks),
            beside="" if paper is None else f"{paper.title}, {paper.where}",
            theirs="" if paper is None else paper.setting,
            ours=self.ours,
            verdicts=tuple(self.judged()),
            missing=tuple(self.missing()),
            experiment=self.experiment.name,
        )


def _different(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({json.dumps(one, sort_keys=True): one for one in found}.values())
