"""Experiments: TOML files of measurements, with the part of a paper that they are compared with."""

from __future__ import annotations

import hashlib
import json
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, PlainSerializer, ValidationError, model_validator

from kvkeep.errors import UsageError, unknown
from kvkeep_lab.cell import Cell
from kvkeep_lab.experiments import check_name, packaged
from kvkeep_lab.paper import STRICT, Claim, ComparedPaper, Text
from kvkeep_lab.reading import takes_budget
from kvkeep_lab.store import ResultFile, TaskRecord
from kvkeep_lab.studies import STUDIES, Study
from kvkeep_lab.studies.base import BudgetText, MethodName
from kvkeep_lab.tasks import TASKS, Task
from kvkeep_lab.tasks.match import Match
from kvkeep_lab.tuning import Chosen, Tuning

_Kind = TypeVar("_Kind", bound="ExperimentBase")


def _chosen(what: str, known: Mapping[str, type[BaseModel]]) -> BeforeValidator:
    """Parse a table with a ``name`` as the task or study of that name with its sizes."""

    def read(given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        sizes = dict(given)
        name = sizes.pop("name", None)
        if name is None:
            raise UsageError(f"it needs a name: {', '.join(known)}")
        if not isinstance(name, str) or name not in known:
            raise unknown(what, str(name), known)
        return known[name].model_validate(sizes)

    return BeforeValidator(read)


def _dumped(one: Task | Study) -> dict[str, Any]:
    return {"name": one.name, **one.model_dump(mode="json")}


class ExperimentBase(BaseModel, ABC):
    """An experiment, measured for each of ``models`` and ``seeds``."""

    model_config = STRICT

    WITH_METHODS: ClassVar[bool]
    """Whether its numbers belong to methods. Claims must then name methods."""

    name: Text
    title: Text
    models: Annotated[tuple[Text, ...], Field(min_length=1)] = ("smollm2",)
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    weights: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"] = Field(
        "float32",
        validation_alias=AliasChoices("weights", "dtype"),  # its name in stores of kvkeep 0.1
    )
    paper: ComparedPaper | None = None
    smoke: dict[str, Any] = {}
    """Changes for a short run that checks that everything works, in the form of the file."""

    @property
    @abstractmethod
    def subject(self) -> Task | Study:
        """The task or study."""

    @property
    def steps(self) -> int:
        """Number of steps of a cell, for progress: samples, or percent."""
        return self.subject.samples if isinstance(self.subject, Task) else 100

    @abstractmethod
    def _setting(self) -> dict[str, Any]:
        """Return the hashed fields, without the name, the weights and the data."""

    @abstractmethod
    def _variants(self, model: str) -> Iterator[dict[str, Any]]:
        """Yield the fields that distinguish the cells of one model and seed."""

    @model_validator(mode="after")
    def _decidable(self) -> Self:
        known = [metric.name for metric in self.subject.metrics]
        values = () if self.paper is None else self.paper.values
        for metric in [*(claim.metric for claim in self.claims), *(value.metric for value in values)]:
            if metric is not None and metric not in known:
                raise unknown("metric", metric, known)
        for claim in self.claims:
            if claim.metric is not None and bool(claim.methods) != self.WITH_METHODS:
                wrong = "names methods, and a study has none"
                wrong = "does not name the methods that its metric is of" if self.WITH_METHODS else wrong
                raise UsageError(f"the claim '{claim.says}' {wrong}")
        return self

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The claims of the paper."""
        return () if self.paper is None else self.paper.claims

    def cells(self, digest: str) -> list[Cell]:
        """Return all cells; cells with the same prompt are adjacent. ``digest``: digest of the source files."""
        common = {"experiment": self.name, "dtype": self.weights, "data": digest, **self._setting()}
        setting, listed = hashed(common), []
        for model, seed in product(self.models, self.seeds):
            for variant in self._variants(model):
                of_cell = {"model": model, "seed": seed, **variant}
                listed.append(Cell(hashed({**common, **of_cell}), setting, **{"method": self.subject.name, **of_cell}))
        return listed

    def with_(self, **changes: Any) -> Self:
        """Return the experiment with some fields changed. Raises UsageError for invalid fields."""
        return _validated(type(self), {**self.model_dump(mode="json"), **changes}, f"experiment '{self.name}'")

    def smoked(self) -> Self:
        """Return the experiment with the changes of :attr:`smoke`."""
        changed = _merged(self.model_dump(mode="json"), self.smoke)
        match changed:
            case {"tune": {"candidates": dict(candidates)}, "methods": list(methods)}:  # only for the remaining methods
                changed["tune"]["candidates"] = {name: candidates[name] for name in candidates if name in methods}
        return _validated(type(self), changed, f"[smoke] of experiment '{self.name}'")

    def sources(self, data: Path | None) -> list[Path]:
        """Return the source files. Raises UsageError if files are missing."""
        return self.subject.sources(data)


class Experiment(ExperimentBase):
    """A task: every method at every budget, for every model, seed and point of the task's axes."""

    WITH_METHODS = True

    task: Annotated[Task, _chosen("task", TASKS), PlainSerializer(_dumped)]
    methods: Annotated[tuple[MethodName, ...], Field(min_length=1)]
    budgets: Annotated[tuple[BudgetText, ...], Field(min_length=1)]
    baseline: MethodName = "full"
    """Method to which differences are computed. It is measured first, even if ``methods`` does not name it."""
    chunk: Annotated[int, Field(ge=1)] | None = None
    tune: Tuning | None = None
    """The search for parameters of methods that precedes the measurement."""
    chosen: Chosen = {}
    """The parameters that the search chose."""

    @model_validator(mode="after")
    def _tunable(self) -> Self:
        for name in () if self.tune is None else self.tune.candidates:
            if name not in self.methods:
                raise UsageError(f"[tune] has candidates for '{name}', which is none of the methods")
        return self

    @property
    def subject(self) -> Task:
        """The task."""
        return self.task

    def sources(self, data: Path | None) -> list[Path]:
        """Return the source files. Raises UsageError if files or packages are missing."""
        for module, package in self.task.packages.items():
            if find_spec(module) is None:
                raise UsageError(
                    f"'{self.task.name}' needs the package '{package}', which is missing: {self.task.install}."
                )
        return super().sources(data)

    def _setting(self) -> dict[str, Any]:
        return {"task": {"name": self.task.name, **self.task.setting()}, "chunk": self.chunk}

    def _variants(self, model: str) -> Iterator[dict[str, Any]]:
        for point in self.task.points():
            for method, budget in self.ways(model):
                yield {"method": method, "budget": budget, "point": point}

    def ways(self, model: str) -> Iterator[tuple[str, str | None]]:
        """Yield methods and budgets: the baseline, the other methods without a budget, and the rest by budget, with the
        parameters chosen for a model."""
        methods = list(dict.fromkeys((self.baseline, *self.methods)))
        yield from ((method, None) for method in methods if not takes_budget(method))
        for budget in self.budgets:
            bounded = (self.choice(method, model, budget) for method in methods if takes_budget(method))
            yield from ((method, budget) for method in dict.fromkeys(bounded))

    def choice(self, method: str, model: str, budget: str | None) -> str:
        """Return the chosen form of a method on a model at a budget, or the method itself."""
        return self.chosen.get(model, {}).get(budget or "", {}).get(method, method)

    def tuning(self) -> Experiment:
        """Return the experiment that measures all candidates."""
        assert self.tune is not None
        sizes = {"length": [self.tune.length], "new": self.tune.new, "samples": self.tune.samples}
        return Experiment(
            name=f"{self.name}-tuning",
            title=f"{self.title}: parameters, on other passages",
            models=self.models,
            weights=self.weights,
            task=Match.model_validate(sizes),
            methods=tuple(self.tune.tried(self.methods)),
            budgets=self.budgets,
            baseline=self.baseline,
            chunk=self.chunk,
        )

    def tuned(self, store: ResultFile, digest: str) -> Self:
        """Return the experiment with the parameters chosen by the search's records in ``store``. ``digest``: digest of
        the search's source files."""
        assert self.tune is not None
        keys = {cell.key for cell in self.tuning().cells(digest)}
        records = [one for one in store.records if isinstance(one, TaskRecord) and one.cell in keys]
        return self.model_copy(update={"chosen": self.tune.chosen(records, self.methods)})


class StudyExperiment(ExperimentBase):
    """A study, for every model and seed."""

    WITH_METHODS = False

    study: Annotated[Study, _chosen("study", STUDIES), PlainSerializer(_dumped)]

    @property
    def subject(self) -> Study:
        """The study."""
        return self.study

    def _setting(self) -> dict[str, Any]:
        return {"study": _dumped(self.study)}

    def _variants(self, model: str) -> Iterator[dict[str, Any]]:
        yield {}


def load_experiment(name: str) -> Experiment | StudyExperiment:
    """Return a packaged experiment by its name, or an experiment from a file by its path. The file has a ``[task]`` or
    a ``[study]``.

    Raises UsageError with a sentence about the first error in the experiment or its smoke version.
    """
    path = Path(name)
    check_name(name)
    if name in packaged():
        text, where = resources.files("kvkeep_lab").joinpath(f"experiments/{name}.toml").read_text("utf-8"), name
    else:
        try:
            text, where = path.read_text("utf-8-sig"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise UsageError(f"The experiment '{name}' cannot be read: {reason.lower()}.") from error
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"Experiment '{where}' is not TOML: {str(error)[:1].lower()}{str(error)[1:]}.") from error
    if "task" in given and "study" in given:
        raise UsageError(f"Experiment '{where}' has a [task] and a [study]; it can have one of them.")
    experiment = read_experiment({"name": path.stem, **given}, f"experiment '{where}'")
    experiment.smoked()
    return experiment


def read_experiment(given: dict[str, Any], where: str, recorded: bool = False) -> Experiment | StudyExperiment:
    """Return the experiment from plain types. Raises UsageError with the name ``where``. recorded: it was measured, and
    its methods need not exist with these parameters."""
    if "study" in given:
        return _validated(StudyExperiment, given, where, recorded)
    return _validated(Experiment, given, where, recorded)


def digest(sources: Sequence[Path]) -> str:
    """Return 16 hex digits: a digest of the names and contents of files."""
    total = hashlib.sha256()
    for path in sources:
        total.update(f"{path.name}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def hashed(value: Any) -> str:
    """Return 16 hex digits: a digest of plain types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _merged(given: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``given`` with ``changes``. Nested tables are merged; lists are replaced."""
    merged = dict(given)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if nested else value
    return merged


def _validated(kind: type[_Kind], given: dict[str, Any], where: str, recorded: bool = False) -> _Kind:
    try:
        return kind.model_validate(given, context={"recorded": recorded})
    except ValidationError as error:
        raise UsageError(_sentence(error, where)) from error


def _sentence(error: ValidationError, where: str) -> str:
    """Return a sentence with the first error and the number of further errors."""
    problems = error.errors()
    first = problems[0]
    place = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    reason = {"extra_forbidden": "there is no such setting", "missing": "it is missing"}.get(first["type"])
    reason = reason or (str(cause) if cause is not None else f"{first['msg'][:1].lower()}{first['msg'][1:]}")
    rest = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where[:1].upper()}{where[1:]} is wrong at '{place}': {reason.rstrip('.')}{rest}."
