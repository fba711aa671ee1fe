"""Experiments: small files that say what is measured, and what of which paper it stands beside."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator, model_validator

from kvkeep.budget import Budget
from kvkeep.errors import UsageError, unknown
from kvkeep.lab.reading import takes
from kvkeep.lab.tasks import TASKS, Task
from kvkeep.lab.tasks.base import Point, named

Text = Annotated[str, Field(min_length=1)]
_STRICT = ConfigDict(extra="forbid", frozen=True)


class PaperValue(BaseModel):
    """One of the paper's numbers: ``metric`` and ``value`` as the task tells them (shares from 0 to 1). method, budget:
    as here, where there is such a row; note: what else is to be known."""

    model_config = _STRICT

    metric: Text
    value: float
    method: str = ""
    budget: str | None = None
    note: str = ""


class Paper(BaseModel):
    """What an experiment stands beside. where: the figure or table. setting: their model, precision and machine.
    claims: what the paper says of it, in a sentence each."""

    model_config = _STRICT

    title: Text
    where: Text
    setting: Text
    claims: tuple[Text, ...] = ()
    values: tuple[PaperValue, ...] = ()


@dataclass(frozen=True)
class Cell:
    """What is measured in one go. ``setting`` and ``key``: see :meth:`Experiment.cells`."""

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


class Experiment(BaseModel):
    """Every method at every budget, for every model, seed and point of the task's axes.

    baseline: the method that others are told relative to; measured first, whether ``methods`` names it or not. smoke:
    what is other in a run that only shows that everything works, in the shape of this file.
    """

    model_config = _STRICT

    name: Text
    title: Text
    task: Task
    models: Annotated[tuple[Text, ...], Field(min_length=1)] = ("smollm2",)
    methods: Annotated[tuple[Text, ...], Field(min_length=1)]
    budgets: Annotated[tuple[Text, ...], Field(min_length=1)]
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    baseline: Text = "full"
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    chunk: Annotated[int, Field(ge=1)] | None = None
    paper: Paper | None = None
    smoke: dict[str, Any] = {}

    @field_validator("task", mode="before")
    @classmethod
    def _task(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        sizes = dict(given)
        name = sizes.pop("name", None)
        if name is None:
            raise UsageError(f"it needs a name: {', '.join(TASKS)}")
        if name not in TASKS:
            raise unknown("task", str(name), TASKS)
        return TASKS[name].model_validate(sizes)

    @field_serializer("task")
    def _dump_task(self, task: Task) -> dict[str, Any]:
        return {"name": task.name, **task.model_dump(mode="json")}

    @field_validator("methods", "baseline")
    @classmethod
    def _methods(cls, given: Any) -> Any:
        for method in (given,) if isinstance(given, str) else given:
            takes(method)
        return given

    @field_validator("budgets")
    @classmethod
    def _budgets(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for budget in given:
            Budget.parse(budget)
        return given

    @model_validator(mode="after")
    def _metrics(self) -> Experiment:
        known = [metric.name for metric in self.task.metrics]
        for value in self.paper.values if self.paper is not None else ():
            if value.metric not in known:
                raise unknown("metric", value.metric, known)
        return self

    def with_(self, **changes: Any) -> Experiment:
        """Return the experiment with some fields changed; raises UsageError as reading it does."""
        return _validated({**self.model_dump(mode="json"), **changes}, f"experiment '{self.name}'")

    def smoked(self) -> Experiment:
        """Return the smoke version."""
        return _validated(_merged(self.model_dump(mode="json"), self.smoke), f"[smoke] of experiment '{self.name}'")

    def cells(self, digest: str) -> list[Cell]:
        """Return all cells, those that share a prompt side by side; ``digest``: of the files prompts are made of.

        A cell's *setting* is what it has to share with another to be compared with it, its *key* is the setting with
        model, method, budget, seed and point: both are hashes, of the experiment's name, the task's sizes, dtype, chunk
        and data, and of nothing that does not change a number.
        """
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

    def sources(self, data: Path | None) -> list[Path]:
        """Return the files that prompts are made of; raises UsageError where they, or packages, are missing."""
        for module, package in self.task.packages.items():
            if find_spec(module) is None:
                raise UsageError(
                    f"Task '{self.task.name}' needs the package '{package}', which is missing: "
                    f"pip install 'kvkeep[{self.task.extra}]'."
                )
        return self.task.sources(data)


def packaged() -> list[str]:
    """Return the names of the experiments that come with the library."""
    folder = resources.files("kvkeep.lab").joinpath("experiments")
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load_experiment(name: str) -> Experiment:
    """Return a packaged experiment by its name, or a file by its path. Raises UsageError with one sentence that says
    what is wrong with it; its smoke version is checked, too."""
    path = Path(name)
    if name in packaged():
        text, where = resources.files("kvkeep.lab").joinpath(f"experiments/{name}.toml").read_text("utf-8"), name
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
    experiment = _validated({"name": path.stem, **given}, f"experiment '{where}'")
    experiment.smoked()
    return experiment


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


def _validated(given: dict[str, Any], where: str) -> Experiment:
    try:
        return Experiment.model_validate(given)
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
