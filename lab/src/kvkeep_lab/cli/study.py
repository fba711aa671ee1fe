"""Commands made from studies: the fields of a study become options, and its tables and figure become the output.

``kvkeep analyse STUDY`` runs any study; some studies also have a separate command. Each command takes a model, its
weights and a device. It prints tables or one JSON object, and draws a figure if the study has one.
"""

from __future__ import annotations

import inspect
import math
import re
import runpy
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvkeep.cli import options
from kvkeep.cli.options import split_list
from kvkeep.cli.output import err, loading, note, print_json, write
from kvkeep.cli.startup import fetch_model
from kvkeep.errors import Interrupted, KvkeepError, StoreError, UsageError
from kvkeep.models.loading import load
from kvkeep.plugins import first_line
from kvkeep.policies.registry import register
from kvkeep_lab.cli.console import show
from kvkeep_lab.figures import check_figure
from kvkeep_lab.page import check_output, write_page
from kvkeep_lab.partial import Ending
from kvkeep_lab.provenance import machine
from kvkeep_lab.studies import STUDIES, Study
from kvkeep_lab.studies.base import Drawn, Exported, Flag, Trial
from kvkeep_lab.studies.base import Progress as Report
from kvkeep_lab.tables import csv_text
from kvkeep_lab.tasks.texts import named_files

FILE = (
    "Text file to read. Several files, a folder of .txt files, or a quoted pattern are read one after another; - is "
    "standard input."
)
OUTPUT = "Draw a figure and save it to this file (.png, .svg or .pdf)."
CSV = "Write every number to this .csv file."
LATEX = "Write a LaTeX table for a paper to this .tex file."
BETWEEN_S = 5.0
"""Minimum seconds between two lines of progress."""


def command(study: type[Study]) -> Callable[..., None]:
    """Return the command of a study: a function whose signature has an option for each field, and the common
    options."""
    fields = {name: _field(field) for name, field in study.model_fields.items()}
    shared: dict[str, tuple[Any, Any]] = {"model": (options.Model, "smollm2")}
    if study.text != "none":
        files = list[str] if study.text == "needed" else list[str] | None
        default = inspect.Parameter.empty if study.text == "needed" else None
        shared["file"] = (Annotated[files, typer.Option("--file", "-f", help=study.reads or FILE)], default)
    if issubclass(study, Drawn):
        shared["output"] = (Annotated[str | None, typer.Option("--output", "-o", help=OUTPUT)], None)
    if issubclass(study, Exported):
        shared["csv"] = (Annotated[str | None, typer.Option(metavar="FILE", help=CSV)], None)
        shared["latex"] = (Annotated[str | None, typer.Option(metavar="FILE", help=LATEX)], None)
    shared |= {"weights": (options.Weights, study.weights), "device": (options.Device, None)}
    shared |= {"json": (options.Json, False)}
    assert not set(fields) & set(shared), "a field of the study has the name of an option that all commands share"

    def run(**given: Any) -> None:
        sizes = {name: given.pop(name) for name in fields}
        _run(_made(study, sizes).variant(), **given)

    listed = fields | shared
    kind = inspect.Parameter.KEYWORD_ONLY
    run.__name__ = (study.command or study.name).replace("-", "_")
    run.__doc__ = f"{study.about[:1].upper()}{study.about[1:]}.\n\n{study.protocol}"
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind, default=default, annotation=hint) for name, (hint, default) in listed.items()]
    )
    run.__annotations__ = {name: hint for name, (hint, _) in listed.items()}
    return run


def _field(field: FieldInfo) -> tuple[Any, Any]:
    """Return the annotation and the default of a field's option. Lists are separated by commas, or the option is
    repeated."""
    flag = _flag(field)
    default = field.get_default(call_default_factory=True) if flag.default is ... else flag.default
    kind, text = _plain(field.annotation), field.description or ""
    text = f"{text[:1].upper()}{text[1:]}."
    completes = options.complete_methods if "-x" in flag.names else None
    if kind is list:
        shown = ",".join(map(str, default)) if default else False
        help = f"{text} Separate several by commas, or repeat the option."
        option = typer.Option(*flag.names, help=help, show_default=shown, autocompletion=completes)
        return Annotated[list[str] | None, option], None
    option = typer.Option(*flag.names, help=text, autocompletion=completes)
    return Annotated[kind if default is not None else kind | None, option], default


def _flag(field: FieldInfo) -> Flag:
    return next((one for one in field.metadata if isinstance(one, Flag)), Flag())


def _plain(hint: Any) -> Any:
    """Return the type that Typer parses for a field: bool, int, float, list or str."""
    while True:
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif get_origin(hint) in (Union, UnionType):
            hint = next(part for part in get_args(hint) if part is not NoneType)
        else:
            break
    if get_origin(hint) is list:
        return list
    return hint if hint in (bool, int, float) else str


def _made(study: type[Study], given: dict[str, Any]) -> Study:
    """Return the study with these options. Raises UsageError for the first invalid option."""
    sizes: dict[str, Any] = {}
    for name, value in given.items():
        field = study.model_fields[name]
        flag = _flag(field)
        if value is None and flag.default is not ...:
            sizes[name] = flag.default
        elif value is not None:
            sizes[name] = split_list(value, _option(name, field)) if _plain(field.annotation) is list else value
            if "-x" in flag.names:
                sizes[name] = [*map(_own_part, sizes[name])] if isinstance(sizes[name], list) else _own_part(value)
    try:
        return study.model_validate(sizes)
    except ValidationError as error:
        first = error.errors()[0]
        name, cause = str(first["loc"][0]), first.get("ctx", {}).get("error")
        option, said = _option(name, study.model_fields[name]), first["msg"]
        if isinstance(cause, KvkeepError):
            raise UsageError(f"{option}: {cause}") from None
        raise UsageError(f"{option} '{first['input']}' is not understood: {said[:1].lower()}{said[1:]}.") from None


def _own_part(method: str) -> str:
    """Register the selector with which a method like "mine.py:Large:newest=4+quantize:4" begins; return the method with
    its name alone. Raises UsageError for a file that cannot be used."""
    if (found := re.match(r"(.+\.py):(\w+)", method)) is None:
        return method
    path, name = found.groups()
    try:
        register(name, runpy.run_path(path)[name])
    except KvkeepError:
        raise
    except KeyError:
        raise UsageError(f"The file '{path}' defines no '{name}'.") from None
    except Exception as error:
        raise UsageError(f"The file '{path}' cannot be used: {first_line(error)}.") from error
    return f"{name}{method[found.end() :]}"


def _option(name: str, field: FieldInfo) -> str:
    names = _flag(field).names or (f"--{name.replace('_', '-')}",)
    return names[0].partition("/")[0]


def _run(
    study: Study,
    *,
    model: str,
    weights: str,
    device: str | None,
    json: bool,
    file: list[str] | None = None,
    output: str | None = None,
    csv: str | None = None,
    latex: str | None = None,
) -> None:
    """Measure, and print the results."""
    files = named_files(file or ())
    study.check(files)
    if output is not None:
        check_figure(output)
    exports = {
        name: check_output(path, f"{study.name}.{name}") for name, path in (("csv", csv), ("tex", latex)) if path
    }
    fetch_model(model)
    with loading(model):
        loaded = load(model, weights=weights, device=device, progress=note)
    stopped = None
    with _bar() as (report, say), _sigterm() as signals:
        try:
            found = study.measure(Trial(loaded, files, progress=report, say=say))
        except (KeyboardInterrupt, Ending) as stop:
            found, stopped = getattr(stop, "found", None), str(stop) or "Interrupted."
            if not isinstance(found, study.found):
                raise _interrupted(
                    "Interrupted before the first measurement; there is nothing to show.", signals
                ) from None
    where = machine(loaded) | study.conditions()
    problem = study.problem(found)
    try:
        if problem is None:
            _write(study, found, where, output, exports)
    except StoreError as error:  # the results are shown nevertheless
        problem = str(error)
    if json:
        drawn = {"figure": None if problem else output} if isinstance(study, Drawn) else {}
        print_json({"machine": where, **study.as_json(found), **drawn})
    else:
        note(" ".join(f"{name}={value}" for name, value in where.items()))
        if (text := study.printed(found)) is not None:
            write(f"{text}\n")
        for table in (*study.details(found), *study.tables(found)) if text is None else ():
            show(table)
        if output is not None and problem is None:
            note(f"The figure is saved in {output}.")
        for target in exports.values() if problem is None else ():
            note(f"Written: {target}")
    if stopped is not None:
        raise _interrupted(f"{stopped} The results above were measured before that. {problem or ''}".rstrip(), signals)
    if problem is not None:
        raise KvkeepError(problem)


def _write(study: Study, found: Any, where: Mapping[str, Any], output: str | None, exports: Mapping[str, Path]) -> None:
    """Draw the figure and write the other files. Raises StoreError if one cannot be written."""
    if output is not None:
        assert isinstance(study, Drawn)
        study.draw(found, output, title=f"{where['model']}, {where['weights']}")
    for name, target in exports.items():
        assert isinstance(study, Exported)
        same = {key: where[key] for key in ("model", "weights", "device", "threads", "torch", "transformers")}
        records = [{**one, **same} for one in study.records(found)]
        write_page(target, csv_text(records) if name == "csv" else study.latex(found, where))


@contextmanager
def _sigterm() -> Iterator[list[int]]:
    """Handle SIGTERM like Ctrl-C within the block; yield a list that receives its number."""
    signals: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted(sentence: str, signals: Sequence[int]) -> Interrupted:
    """Return the error of an interruption, with a shell's exit code for SIGTERM."""
    error = Interrupted(sentence)
    if signals:
        error.exit_code = 128 + signals[0]
    return error


@contextmanager
def _bar() -> Iterator[tuple[Report, Callable[[str], None]]]:
    """Show a progress bar during a measurement, or lines without a terminal. Yield a function that reports progress,
    and one that prints a line of results."""
    if not err.is_terminal:
        yield _lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total), note


def _lines() -> tuple[Report, Callable[[str], None]]:
    """Return a function that prints progress in lines, at most one per :data:`BETWEEN_S`, and one that prints a line of
    results. A study that prints results gets no progress lines."""
    last, noted = "", time.monotonic()

    def say(line: str) -> None:
        nonlocal noted
        note(line)
        noted = math.inf

    def report(what: str, done: float, total: float) -> None:
        nonlocal last, noted
        if what != last and last and time.monotonic() - noted >= BETWEEN_S:
            note(f"Finished {last}; {100 * done / max(total, 1e-9):.0f} % of the work is done.")
            noted = time.monotonic()
        last = what

    return report, say


analyse = typer.Typer(
    add_completion=False, help="Run any study on one model: data, table and figure.", no_args_is_help=True
)
for each in STUDIES.values():
    analyse.command(name=each.command or each.name)(command(each))

verify, prove, bench, compare, stream = (
    command(STUDIES[name]) for name in ("verify", "prove", "bench", "compare", "stream")
)
longchat, recompute = command(STUDIES["long-chat"]), command(STUDIES["recompute"])
