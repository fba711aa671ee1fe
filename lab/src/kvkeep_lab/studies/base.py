"""A study: one measurement with its result, tables, figure and verdicts. It is part of an experiment, and a
command whose options are its fields (:mod:`kvkeep_lab.cli.study`)."""

from __future__ import annotations

import math
import os
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationInfo, model_serializer
from torch import Tensor

from kvkeep.decode.texts import read_text
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.models.loading import Loaded
from kvkeep.policies.methods import requested, resolve
from kvkeep.policies.names import STOCK
from kvkeep_lab.peers.engines import engine_of
from kvkeep_lab.peers.servers import server_of
from kvkeep_lab.reading import takes
from kvkeep_lab.tables import Table
from kvkeep_lab.tasks.base import Metric
from kvkeep_lab.tasks.texts import joined, passage, text_files

Progress = Callable[[str, float, float], None]
"""Called with a description of the work, the work done, and the total work."""

DIGITS = 5
"""Significant digits of stored numbers."""

LEAST = 16
"""Minimum tokens of a text."""


@dataclass(frozen=True)
class Trial:
    """The inputs of a study."""

    loaded: Loaded
    sources: Sequence[Path] = ()
    """Files of text."""
    seed: int | None = None
    """Seed of an experiment; None in a command, where texts are read from their start."""
    progress: Progress = lambda what, done, total: None
    say: Callable[[str], None] = lambda line: None
    """Called with each line of results as soon as it is measured."""

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer


BUDGET = "budget of the methods that have one: entries per layer (512), bytes (64MB), or a share (25%)"
"""Description of a budget field."""


class Flag:
    """The command-line option of a field, beside its type: ``new: Annotated[int, Flag("--max-tokens", "-n")]``.

    names: names of the option; without names, the field's name. default: the command's default, if it differs.
    """

    def __init__(self, *names: str, default: Any = ...) -> None:
        self.names, self.default = names, default


# -- types of fields ----------------------------------------------------------------------------------


def _checked(check: Callable[[Any], object]) -> AfterValidator:
    """Return a validator that returns a value unchanged or raises the error of ``check``. Parameters of a
    recorded method need not exist: an earlier version had them."""

    def validate(value: Any, info: ValidationInfo) -> Any:
        try:
            check(value)
        except UsageError:
            if not (info.context or {}).get("recorded"):
                raise
            check(re.sub(r":[^+]*", "", value))
        return value

    return AfterValidator(validate)


def _share(value: float) -> None:
    if not 0 < value < 1:
        raise UsageError(f"A share is between 0 and 1, not {value:g}.")


MethodName = Annotated[str, _checked(takes)]
"""A method or a peer."""

OwnMethod = Annotated[str, _checked(lambda method: None if method == STOCK else resolve(method))]
"""A method of kvkeep, or the stock cache."""

EngineName = Annotated[str, _checked(engine_of)]
"""An engine by others."""

ServerName = Annotated[str, _checked(server_of)]
"""A server by others. Every engine has one."""

BudgetText = Annotated[str, _checked(lambda budget: requested(None, budget))]
"""A budget as the user wrote it."""

Kind = Annotated[str, _checked(lambda kind: requested(None, "1", checkpoint=kind))]
"""A kind of checkpoint."""

PlaceName = Annotated[str, _checked(lambda where: requested(None, "1", where=where))]
"""A place of checkpoints."""

Share = Annotated[float, _checked(_share)]
"""A number between 0 and 1, excluding both."""

Count = Annotated[int, Field(ge=1)]

rising = AfterValidator(lambda values: sorted(set(values)))
"""Sorts a list of numbers and removes duplicates."""

unique = AfterValidator(lambda values: list(dict.fromkeys(values)))
"""Removes duplicates and keeps the first of each."""


# -- studies ------------------------------------------------------------------------------------------


class Study(BaseModel, ABC):
    """A study. Its fields are the settings of an experiment's ``[study]`` and the options of its command.

    An experiment's identity excludes fields that are None, so that a new field does not invalidate measurements. A
    study that is :class:`Drawn` has a figure. A study that is :class:`Exported` writes files for other programs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    """Name in experiments."""
    command: ClassVar[str] = ""
    """Name in ``kvkeep analyse``, if it differs."""
    about: ClassVar[str]
    """Description in one line."""
    protocol: ClassVar[str]
    """Description of the measurement for the report."""
    found: ClassVar[type]
    """The dataclass that :meth:`measure` returns."""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    """The main numbers, which the report compares with a paper's. :meth:`scores` returns them."""
    certain: ClassVar[tuple[str, ...]] = ()
    """Names of metrics that are the same for every seed and run."""
    text: ClassVar[Literal["none", "optional", "needed"]] = "none"
    """Whether the command reads files."""
    reads: ClassVar[str] = ""
    """Help text of these files."""
    weights: ClassVar[str] = "float32"
    """Default precision of the model's weights; float32 for studies that compare methods to the last bit."""

    @model_serializer(mode="wrap")
    def _without_none(self, dump: Any) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}

    def sources(self, data: Path | None) -> list[Path]:
        """Return the source files of an experiment. Raises UsageError with the required contents of ``data``."""
        return []

    def check(self, files: Sequence[Path]) -> None:
        """Raise UsageError for incompatible fields and files of a command. It runs before a model is loaded."""

    @abstractmethod
    def measure(self, trial: Trial) -> Any:
        """Measure, and return an instance of :attr:`found`.

        An interrupt raises :class:`~kvkeep_lab.partial.Interruption` with the partial results, or KeyboardInterrupt
        without any. An error after partial results raises :class:`~kvkeep_lab.partial.Ending`.
        """

    @abstractmethod
    def tables(self, found: Any) -> list[Table]:
        """Return tables of the results, with the paper's numbers if it has any."""

    def details(self, found: Any) -> list[Table]:
        """Return further tables that a command shows before the others: by layer, or by step."""
        return []

    def scores(self, found: Any) -> dict[str, float]:
        """Return the available numbers of ``metrics``."""
        return {}

    def joined(self, found: Sequence[Any]) -> Any:
        """Return the results that a report shows of those of several seeds: the first ones, or all as one."""
        return found[0]

    def problem(self, found: Any) -> str | None:
        """Return the error with which a command exits after it shows the results; None without an error."""
        return None

    def variant(self) -> Study:
        """Return the study that a command with these fields runs: this one, unless a field selects another. Raises
        UsageError for fields that the other study does not use."""
        return self

    def printed(self, found: Any) -> str | None:
        """Return the text that a command prints instead of tables; None for tables."""
        return None

    def conditions(self) -> dict[str, Any]:
        """Return conditions of the figures in addition to model, machine and versions."""
        return {}

    def as_json(self, found: Any) -> dict[str, Any]:
        """Return the JSON object that a command prints."""
        return asdict(found)

    def plain(self, found: Any) -> Any:
        """Return the results as plain types, with numbers of :data:`DIGITS` digits. Raises KvkeepError for a number
        that is not finite."""
        return _compact(TypeAdapter(self.found).dump_python(found, mode="json"))

    def restored(self, data: Any) -> Any:
        """Return the results from the plain types of :meth:`plain`. Raises ValueError for invalid data."""
        return TypeAdapter(self.found).validate_python(data)


@runtime_checkable
class Drawn(Protocol):
    """A study with a figure."""

    def draw(self, found: Any, path: str | os.PathLike[str], *, title: str) -> None:
        """Draw the results of :meth:`Study.measure`. Raises StoreError if the file cannot be written."""


@runtime_checkable
class Exported(Protocol):
    """A study whose results a command can write to files for spreadsheets and papers."""

    def records(self, found: Any) -> list[dict[str, Any]]:
        """Return the lines of a CSV file, one number in each field."""

    def latex(self, found: Any, where: Mapping[str, Any]) -> str:
        """Return a table in LaTeX; ``where``: the conditions of the measurement, for its caption."""


class TextStudy(Study):
    """A study that reads a passage of a text; in an experiment each seed has a different passage."""

    text = "needed"

    tokens: Annotated[int, Flag("--limit")] = Field(512, ge=LEAST, description="number of tokens to read from the text")

    def sources(self, data: Path | None) -> list[Path]:
        return text_files(data)

    def passage(self, trial: Trial) -> Tensor:
        """Return the ids of a passage that the seed selects, or of the first tokens, (1, tokens)."""
        if trial.seed is None:
            return first_tokens(trial.loaded, trial.sources, self.tokens)
        ids = passage(trial.tokenizer, joined(trial.sources), self.tokens, random.Random(trial.seed))
        return torch.tensor([ids], device=trial.model.device)


def first_tokens(loaded: Loaded, files: Sequence[Path], limit: int | None) -> Tensor:
    """Return the first ``limit`` tokens (None: all) of files, one after another, (1, tokens); "-" is standard input.
    Raises UsageError for a text of fewer than :data:`LEAST` tokens."""
    ids = loaded.tokenizer(text_of(files), verbose=False).input_ids[:limit]
    if len(ids) < LEAST:
        raise UsageError(f"The text has {len(ids)} tokens; give one of at least {LEAST}.")
    return torch.tensor([ids], device=loaded.model.device)


def text_of(files: Sequence[Path]) -> str:
    """Return the concatenated texts of files. Raises UsageError for an unreadable file."""
    return "\n\n".join(read_text(str(path)) for path in files)


def part(progress: Progress, place: int, parts: int) -> Progress:
    """Return a function that reports the progress of the part ``place`` of ``parts`` equal parts."""
    return lambda what, done, total: progress(what, place + done / max(total, 1e-9), parts)


def counted(progress: Progress, what: str) -> Callable[[int, int], None]:
    """Return a function of done and total that reports both to ``progress`` with the description ``what``."""
    return lambda done, total: progress(what, done, total)


def _compact(value: Any) -> Any:
    match value:
        case float():
            if not math.isfinite(value):
                raise KvkeepError(f"The model gave {value}, which is not a finite number.")
            return float(f"{value:.{DIGITS}g}")
        case dict():
            return {key: _compact(part) for key, part in value.items()}
        case list():
            return [_compact(part) for part in value]
        case _:
            return value
