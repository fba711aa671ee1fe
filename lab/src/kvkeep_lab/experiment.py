"""Experiments: small files that say what is measured, and what of which paper it stands beside."""

from __future__ import annotations

import hashlib
import json
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator, model_validator

from kvkeep.budget import Budget
from kvkeep.errors import UsageError, unknown
from kvkeep_lab.reading import takes
from kvkeep_lab.studies import STUDIES, Study
from kvkeep_lab.tasks import TASKS, Task
from kvkeep_lab.tasks.base import Point, named

Text = Annotated[str, Field(min_length=1)]
_STRICT = ConfigDict(extra="forbid", frozen=True)
_Outline = TypeVar("_Outline", bound="Outline")


class PaperValue(BaseModel):
    """One of the paper's numbers: ``metric`` and ``value`` as the task tells them (shares from 0 to 1). method, budget:
    as here, where there is such a row (no budget: at every budget); note: what else is to be known."""

    model_config = _STRICT

    metric: Text
    value: float
    method: str = ""
    budget: str | None = None
    note: str = ""


class Claim(BaseModel):
    """What the paper says, and which of our numbers decide it; a sentence alone is one that no number here decides.

    says: the sentence. metric: whose mean is asked for. methods: each of them is meant, at each of ``budgets`` (none:
    at every budget of the experiment). at_least, at_most: the limits, as the task tells the metric; where ``than``
    names other methods, limits of the difference from each of them at the same budget.
    """

    model_config = _STRICT

    says: Text
    metric: Text | None = None
    methods: tuple[Text, ...] = ()
    budgets: tuple[Text, ...] = ()
    than: tuple[Text, ...] = ()
    at_least: float | None = None
    at_most: float | None = None

    @field_validator("methods", "than")
    @classmethod
    def _methods(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        return _known(given)

    @field_validator("budgets")
    @classmethod
    def _budgets(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        return _readable(given)

    @model_validator(mode="after")
    def _decidable(self) -> Claim:
        limits = [limit for limit in (self.at_least, self.at_most) if limit is not None]
        if (self.metric is None) == bool(limits):
            raise UsageError("what decides it is a metric, and at_least or at_most")
        if self.metric is None and (self.methods or self.budgets or self.than):
            raise UsageError("methods and budgets say nothing without a metric")
        if limits != sorted(limits):
            raise UsageError(f"no number is at least {self.at_least:g} and at most {self.at_most:g}")
        return self


class Paper(BaseModel):
    """What an experiment stands beside. where: the figure or table. setting: their model, precision and machine.
    claims: what the paper says of it."""

    model_config = _STRICT

    title: Text
    where: Text
    setting: Text
    claims: tuple[Claim, ...] = ()
    values: tuple[PaperValue, ...] = ()

    @field_validator("claims", mode="before")
    @classmethod
    def _claims(cls, given: Any) -> Any:
        listed = isinstance(given, list | tuple)
        return [{"says": claim} if isinstance(claim, str) else claim for claim in given] if listed else given


@dataclass(frozen=True)
class Cell:
    """What is measured in one go. ``setting`` and ``key``: see :meth:`Outline.cells`. method: of a study, its name."""

    key: str
    setting: str
    model: str
    method: str
    budget: str | None
    point: Point
    seed: int

    @property
    def label(self) -> str:
        """The cell as a person reads it."""
        place = ", ".join(f"{name} {named(value)}" for name, value in self.point.items())
        return " ".join(part for part in (self.method, self.budget, f"({place})" if place else "") if part)


class Outline(BaseModel, ABC):
    """What every experiment says. It is measured for each of ``models`` and ``seeds``. smoke: what is other in a run
    that only shows that everything works, in the shape of the file."""

    model_config = _STRICT

    name: Text
    title: Text
    models: Annotated[tuple[Text, ...], Field(min_length=1)] = ("smollm2",)
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    paper: Paper | None = None
    smoke: dict[str, Any] = {}

    @property
    @abstractmethod
    def subject(self) -> Task | Study:
        """What is measured."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Into how many steps the work of a cell is divided."""

    @abstractmethod
    def cells(self, digest: str) -> list[Cell]:
        """Return all cells; ``digest``: of the files that are read.

        A cell's *setting* is what it has to share with another to be compared with it, its *key* is the setting with
        all that is its own: both are hashes, of what changes numbers and of nothing else.
        """

    @model_validator(mode="after")
    def _metrics(self) -> Self:
        known = [metric.name for metric in self.subject.metrics]
        named = [claim.metric for claim in self.claims]
        named += [] if self.paper is None else [value.metric for value in self.paper.values]
        for metric in named:
            if metric is not None and metric not in known:
                raise unknown("metric", metric, known)
        return self

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The paper's."""
        return () if self.paper is None else self.paper.claims

    def with_(self, **changes: Any) -> Self:
        """Return the experiment with some fields changed; raises UsageError as reading it does."""
        return _validated(type(self), {**self.model_dump(mode="json"), **changes}, f"experiment '{self.name}'")

    def smoked(self) -> Self:
        """Return the smoke version."""
        changed = _merged(self.model_dump(mode="json"), self.smoke)
        return _validated(type(self), changed, f"[smoke] of experiment '{self.name}'")

    def sources(self, data: Path | None) -> list[Path]:
        """Return the files that are read; raises UsageError where they, or packages, are missing."""
        for module, package in self.subject.packages.items():
            if find_spec(module) is None:
                raise UsageError(
                    f"'{self.subject.name}' needs the package '{package}', which is missing: "
                    f"pip install 'kvkeep[{self.subject.extra}]'."
                )
        return self.subject.sources(data)


class Experiment(Outline):
    """A task: every method at every budget, for every model, seed and point of the task's axes.

    baseline: the method that others are told relative to; measured first, whether ``methods`` names it or not.
    """

    task: Task
    methods: Annotated[tuple[Text, ...], Field(min_length=1)]
    budgets: Annotated[tuple[Text, ...], Field(min_length=1)]
    baseline: Text = "full"
    chunk: Annotated[int, Field(ge=1)] | None = None

    @field_validator("task", mode="before")
    @classmethod
    def _task(cls, given: Any) -> Any:
        return _chosen("task", given, TASKS)

    @field_serializer("task")
    def _dump_task(self, task: Task) -> dict[str, Any]:
        return {"name": task.name, **task.model_dump(mode="json")}

    @field_validator("methods", "baseline")
    @classmethod
    def _methods(cls, given: Any) -> Any:
        _known((given,) if isinstance(given, str) else given)
        return given

    @field_validator("budgets")
    @classmethod
    def _budgets(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        return _readable(given)

    @model_validator(mode="after")
    def _decidable(self) -> Self:
        for claim in self.claims:
            if claim.metric is not None and not claim.methods:
                raise UsageError(f"the claim '{claim.says}' does not name the methods that its metric is asked of")
        return self

    @property
    def subject(self) -> Task:
        """The task."""
        return self.task

    @property
    def steps(self) -> int:
        """The samples."""
        return self.task.samples

    def cells(self, digest: str) -> list[Cell]:
        """Return all cells, those that share a prompt side by side. The setting is of the experiment's name, the task's
        sizes, dtype, chunk and data; a cell's own are model, method, budget, seed and point."""
        task = {"name": self.task.name, **self.task.setting()}
        common = {"experiment": self.name, "task": task, "dtype": self.dtype, "chunk": self.chunk, "data": digest}
        setting, listed = hashed(common), []
        for model in self.models:
            for seed in self.seeds:
                for point in self.task.points():
                    for method, budget in self.ways():
                        own: dict[str, Any] = {"model": model, "method": method, "budget": budget}
                        own |= {"seed": seed, "point": point}
                        listed.append(Cell(hashed({**common, **own}), setting, **own))
        return listed

    def ways(self) -> Iterator[tuple[str, str | None]]:
        """Yield methods and budgets: the baseline, the others that take no budget, and the rest by budget."""
        methods = list(dict.fromkeys((self.baseline, *self.methods)))
        yield from ((method, None) for method in methods if "budget" not in takes(method))
        for budget in self.budgets:
            yield from ((method, budget) for method in methods if "budget" in takes(method))


class Inquiry(Outline):
    """A study, for every model and seed."""

    STEPS: ClassVar[int] = 100

    study: Study

    @field_validator("study", mode="before")
    @classmethod
    def _study(cls, given: Any) -> Any:
        return _chosen("study", given, STUDIES)

    @model_validator(mode="after")
    def _decidable(self) -> Self:
        for claim in self.claims:
            if claim.methods:
                raise UsageError(f"the claim '{claim.says}' names methods, and a study's numbers are of none")
        return self

    @field_serializer("study")
    def _dump_study(self, study: Study) -> dict[str, Any]:
        return {"name": study.name, **study.model_dump(mode="json")}

    @property
    def subject(self) -> Study:
        """The study."""
        return self.study

    @property
    def steps(self) -> int:
        """Percent."""
        return self.STEPS

    def cells(self, digest: str) -> list[Cell]:
        """Return one cell for each model and seed. The setting is of the experiment's name, the study's sizes, dtype
        and data."""
        study = {"name": self.study.name, **self.study.model_dump(mode="json")}
        common = {"experiment": self.name, "study": study, "dtype": self.dtype, "data": digest}
        listed = []
        for model in self.models:
            for seed in self.seeds:
                own: dict[str, Any] = {"model": model, "seed": seed}
                key = hashed({**common, **own})
                listed.append(Cell(key, hashed(common), model, self.study.name, None, {}, seed))
        return listed


def _chosen(what: str, given: Any, known: Mapping[str, type[BaseModel]]) -> Any:
    """Return the task or study that ``given`` names, with the sizes it has."""
    if not isinstance(given, dict):
        return given
    sizes = dict(given)
    name = sizes.pop("name", None)
    if name is None:
        raise UsageError(f"it needs a name: {', '.join(known)}")
    if name not in known:
        raise unknown(what, str(name), known)
    return known[name].model_validate(sizes)


def packaged() -> list[str]:
    """Return the names of the experiments that come with the library."""
    folder = resources.files("kvkeep_lab").joinpath("experiments")
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load_experiment(name: str) -> Experiment | Inquiry:
    """Return a packaged experiment by its name, or a file by its path: one with a ``[task]`` or with a ``[study]``.

    Raises UsageError with one sentence that says what is wrong with it; its smoke version is checked, too."""
    path = Path(name)
    if name in packaged():
        text, where = resources.files("kvkeep_lab").joinpath(f"experiments/{name}.toml").read_text("utf-8"), name
    elif path.suffix == ".toml":
        try:
            text, where = path.read_text("utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise UsageError(f"The experiment '{name}' cannot be read: {reason.lower()}.") from error
    else:
        raise unknown("experiment", name, packaged())
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"Experiment '{where}' is not TOML: {str(error)[:1].lower()}{str(error)[1:]}.") from error
    if "task" in given and "study" in given:
        raise UsageError(f"Experiment '{where}' has a [task] and a [study]; it can have one of them.")
    experiment = read_experiment({"name": path.stem, **given}, f"experiment '{where}'")
    experiment.smoked()
    return experiment


def read_experiment(given: dict[str, Any], where: str) -> Experiment | Inquiry:
    """Return the experiment that plain types describe; raises UsageError, naming it as ``where``."""
    return _validated(Inquiry, given, where) if "study" in given else _validated(Experiment, given, where)


def _known(methods: tuple[str, ...]) -> tuple[str, ...]:
    for method in methods:
        takes(method)
    return methods


def _readable(budgets: tuple[str, ...]) -> tuple[str, ...]:
    for budget in budgets:
        Budget.parse(budget)
    return budgets


def digest(sources: Sequence[Path]) -> str:
    """Return 16 hex digits of the names and contents of files."""
    total = hashlib.sha256()
    for path in sources:
        total.update(f"{path.name}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def hashed(value: Any) -> str:
    """Return 16 hex digits of plain types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _merged(given: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``given`` with ``changes``, tables within tables merged too; lists are replaced."""
    merged = dict(given)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if nested else value
    return merged


def _validated(kind: type[_Outline], given: dict[str, Any], where: str) -> _Outline:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise UsageError(_sentence(error, where)) from error


def _sentence(error: ValidationError, where: str) -> str:
    """Return the first problem as a sentence, and how many more there are."""
    problems = error.errors()
    first = problems[0]
    place = ".".join(str(part) for part in first["loc"])
    own = first.get("ctx", {}).get("error")
    match first["type"]:
        case "extra_forbidden":
            said = "there is no such setting"
        case "missing":
            said = "it is missing"
        case _:
            said = str(own) if own is not None else f"{first['msg'][:1].lower()}{first['msg'][1:]}"
    rest = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where[:1].upper()}{where[1:]} is wrong at '{place}': {said.rstrip('.')}{rest}."
