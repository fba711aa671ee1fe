"""The contract of a task: prompts made from data, and scores of a model's answers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kvkeep.errors import unknown
from kvkeep_lab.cell import Point
from kvkeep_lab.subject import AnswerCost, Subject


def among(what: str, names: Iterable[str]) -> AfterValidator:
    """Return a validator for a field whose value is one of ``names``. It raises UsageError for other values."""

    def check(name: str) -> str:
        if name not in names:
            raise unknown(what, name, names)
        return name

    return AfterValidator(check)


@dataclass(frozen=True)
class Metric:
    """A number that a task computes for its samples, or for some of them."""

    name: str
    label: str
    better: Literal["higher", "lower"] = "higher"
    """Direction of better numbers."""
    kind: Literal["share", "saving", "number", "perplexity"] = "share"
    """"share" (0 to 1, shown in percent), "saving" (the relative saving against another cost, in percent; negative for
    a higher cost), "number", or "perplexity" (nats per token; the mean is shown as its exponential)."""
    least: float = -math.inf
    """Minimum possible number."""

    @property
    def percent(self) -> bool:
        """Whether it is shown in percent."""
        return self.kind in ("share", "saving")

    @property
    def scale(self) -> tuple[float, float]:
        """Minimum and maximum possible numbers."""
        return (0.0, 1.0) if self.kind == "share" else (self.least, math.inf)

    @property
    def floor(self) -> float | None:
        """The worst possible number; None if it is unbounded."""
        worst = self.scale[self.better == "lower"]
        return worst if math.isfinite(worst) else None


@dataclass(frozen=True)
class Sample:
    """One prompt."""

    ids: list[int]
    """Its token ids."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The data by which the answer is scored."""
    instructions: int = 0
    """The number of its first tokens that are instructions, which methods with '+pinned' pin; 0: the task does not say
    which."""


@dataclass(frozen=True)
class TaskOutcome:
    """The numbers of one sample and their cost. A sample may lack metrics, except the first."""

    scores: dict[str, float]
    cost: AnswerCost
    depth: float | None = None
    """Where the answer stands in the text, in percent; None if the task does not say."""


class Task(BaseModel, ABC):
    """A task. Its fields are the settings of an experiment's ``[task]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    """Name in experiments."""
    about: ClassVar[str]
    """Description in one line."""
    protocol: ClassVar[str]
    """Description of the measurement for the report."""
    metrics: ClassVar[tuple[Metric, ...]]
    """The metrics. Figures show the first."""
    relative: ClassVar[tuple[str, ...]] = ()
    """Metrics that are also shown as differences from the baseline."""
    mapped: ClassVar[tuple[str, ...]] = ()
    """Metrics that are drawn by point, which requires two axes."""
    axes: ClassVar[tuple[str, ...]] = ()
    """Fields that list values. Every combination of values is a separate cell."""
    packages: ClassVar[dict[str, str]] = {}
    """Required packages: names on PyPI by module."""
    install: ClassVar[str] = "pip install ./lab in a clone of kvkeep"
    """The command that installs these packages."""

    samples: int = Field(4, ge=1, description="number of prompts in each cell")

    def points(self) -> list[Point]:
        """Return every combination of the axes; one empty point without axes."""
        return [dict(zip(self.axes, values, strict=True)) for values in product(*(getattr(self, a) for a in self.axes))]

    def setting(self) -> dict[str, Any]:
        """Return the fields that comparable cells share: every field that is not an axis."""
        return {key: value for key, value in self.model_dump(mode="json").items() if key not in self.axes}

    @abstractmethod
    def sources(self, data: Path | None) -> list[Path]:
        """Return the source files of the prompts. Raises UsageError with the required contents of ``data``."""

    @abstractmethod
    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Return the samples of a cell; equal arguments give equal samples. Raises UsageError if there are too few."""

    @abstractmethod
    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        """Generate the answer of ``subject``, and score it."""

    def outcomes(self, subject: Subject, samples: Sequence[Sample]) -> Iterator[TaskOutcome]:
        """Measure each of ``samples``, in their order. A task whose answers can share passes does more at a time."""
        return (self.measure(subject, sample) for sample in samples)
