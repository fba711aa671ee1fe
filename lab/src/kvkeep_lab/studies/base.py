"""What a study is: a measurement of a model or a machine with tables and a figure of its own."""

from __future__ import annotations

import math
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.errors import KvkeepError
from kvkeep.models.loading import Loaded
from kvkeep_lab.reading import takes
from kvkeep_lab.tables import Table
from kvkeep_lab.tasks.base import Metric
from kvkeep_lab.tasks.texts import joined, passage, text_files


def _known(method: str) -> str:
    takes(method)
    return method


def _readable(budget: str) -> str:
    Budget.parse(budget)
    return budget


Progress = Callable[[str, float, float], None]
"""Gets what is being done, how much is done, and of how much."""

MethodName = Annotated[str, AfterValidator(_known)]
"""A size that is a method or a peer, by its name."""

BudgetText = Annotated[str, AfterValidator(_readable)]
"""A size that is a budget in the user's words."""

DIGITS = 5
"""Digits that count of every number that is kept."""


class Study(BaseModel, ABC):
    """A study and its sizes: the fields are what an experiment's ``[study]`` may set.

    name: what experiments call it. about: one line. protocol: how its numbers come about, for the report. found: the
    dataclass that :meth:`measure` returns. metrics: of the few numbers that say most, which a paper's stand beside;
    :meth:`scores` has them. certain: those that neither a seed nor another run changes, so that one is enough.
    packages: what must be installed, by module and by the name that pip knows; ``extra``: which of kvkeep's brings it.
    One that is :class:`Drawn` has a figure, too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    about: ClassVar[str]
    protocol: ClassVar[str]
    found: ClassVar[type]
    metrics: ClassVar[tuple[Metric, ...]] = ()
    certain: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[dict[str, str]] = {}
    extra: ClassVar[str] = "lab"

    def sources(self, data: Path | None) -> list[Path]:
        """Return the files that are read; raises UsageError, saying what ``data`` has to hold."""
        return []

    @abstractmethod
    def measure(self, loaded: Loaded, sources: Sequence[Path], seed: int, progress: Progress) -> Any:
        """Measure, and return a ``found``."""

    @abstractmethod
    def tables(self, found: Any) -> list[Table]:
        """Return what was found, the paper's numbers beside it where it prints some."""

    def scores(self, found: Any) -> dict[str, float]:
        """Return the numbers of ``metrics``, those that there are."""
        return {}

    def plain(self, found: Any) -> Any:
        """Return what was found as plain types, numbers with :data:`DIGITS` digits. Raises KvkeepError for one that is
        not finite."""
        return _compact(TypeAdapter(self.found).dump_python(found, mode="json"))

    def restored(self, data: Any) -> Any:
        """Return what :meth:`plain` was given; raises ValueError for data of another kind."""
        return TypeAdapter(self.found).validate_python(data)


@runtime_checkable
class Drawn(Protocol):
    """A study with a figure."""

    def draw(self, found: Any, path: str | os.PathLike[str], *, title: str) -> None:
        """Draw what :meth:`Study.measure` found; raises StoreError if the file cannot be written."""


class TextStudy(Study):
    """A study that reads a passage of a text, another one for every seed."""

    tokens: int = Field(512, ge=16, description="tokens of the passage")

    def sources(self, data: Path | None) -> list[Path]:
        """Return the texts."""
        return text_files(data)

    def passage(self, loaded: Loaded, sources: Sequence[Path], seed: int) -> Tensor:
        """Return the passage's ids, (1, tokens)."""
        ids = passage(loaded.tokenizer, joined(sources), self.tokens, random.Random(seed))
        return torch.tensor([ids], device=loaded.model.device)


def counted(progress: Progress, what: str) -> Callable[[int, int], None]:
    """Return what tells ``progress`` of done and total, of one thing."""
    return lambda done, total: progress(what, done, total)


def _compact(value: Any) -> Any:
    match value:
        case float():
            if not math.isfinite(value):
                raise KvkeepError(f"The model gave {value}, which is no number to go by.")
            return float(f"{value:.{DIGITS}g}")
        case dict():
            return {key: _compact(part) for key, part in value.items()}
        case list():
            return [_compact(part) for part in value]
        case _:
            return value
