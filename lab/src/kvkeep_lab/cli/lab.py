"""``kvkeep lab``: lists, runs and reports experiments that are compared with papers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import err, note, print_json, show
from kvkeep.errors import KvkeepError, Stopped, UsageError, unknown
from kvkeep_lab.experiments import check_name

if TYPE_CHECKING:
    from kvkeep_lab.cell import Cell
    from kvkeep_lab.runner import Tally
    from kvkeep_lab.store import ResultFile
    from kvkeep_lab.studies import Study
    from kvkeep_lab.tasks import Task

FOLDER = Path("kvkeep-lab")
WORKERS = "Number of processes that measure at the same time."
RAY = "Measure on a Ray cluster: its address, auto (this machine's), or local (started here)."
KVPRESS = "Python interpreter of an environment with kvpress."
_PACE = 3600.0  # seconds over which the remaining time is estimated; a cell may take minutes

app = typer.Typer(
    help="Repeat the experiments of papers: list, run and report them.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command("list")
def list_(json: options.Json = False) -> None:
    """List the experiments that come with the library, what they are made of, and the peers they may name."""
    from kvkeep_lab.experiment import load_experiment
    from kvkeep_lab.experiments import packaged
    from kvkeep_lab.peers import PEERS
    from kvkeep_lab.studies import STUDIES
    from kvkeep_lab.tasks import TASKS

    found = [load_experiment(name) for name in packaged()]
    kinds: dict[str, Mapping[str, type[Task] | type[Study]]] = {"tasks": TASKS, "studies": STUDIES}
    if json:

        def described(kind: type[Task] | type[Study]) -> dict[str, Any]:
            return {"about": kind.about, "sizes": kind.model_json_schema().get("properties", {})}

        about = {title: {name: described(kind) for name, kind in known.items()} for title, known in kinds.items()}
        peers = {name: {"about": peer.about, "needs": peer.needs} for name, peer in PEERS.items()}
        print_json({"experiments": [one.model_dump(mode="json") for one in found], **about, "peers": peers})
        return
    rows = []
    for one in found:
        beside = "-" if one.paper is None else f"{one.paper.title.partition(': ')[0]}, {one.paper.where}"
        rows.append((one.name, one.title, one.subject.name, beside, str(len(one.cells("")))))
    _show("Experiments", ("name", "title", "task or study", "beside", "cells"), rows)
    for title, known in kinds.items():
        sizes = ((name, kind.about, ", ".join(kind.model_fields)) for name, kind in known.items())
        _show(f"\n{title.capitalize()}", ("name", "about", "sizes"), sizes)
    _show("\nPeers", ("name", "about", "needs"), ((name, p.about, p.needs or "-") for name, p in PEERS.items()))


def _show(title: str, headings: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(box=None, header_style="bold", title=title, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    show(table)


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="Name from 'kvkeep lab list', or path to a .toml file.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder with the data: haystack/*.txt, xsum_*.jsonl, ...")
    ] = None,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="Shrink the grid to its smallest sizes and fewer methods, to check that everything works."
        ),
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", "-x", help="Measure only this method; repeat the option for several.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="Model to use in place of the experiment's; repeat the option for several."),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", "-b", help="Measure only this budget of a task; repeat the option for several."),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=VALUE",
            help="Measure only this value of an axis of the task (question=seen) or this seed (seed=0); repeat the "
            "option for several.",
        ),
    ] = None,
    store: Annotated[
        Path | None, typer.Option("--store", help="File of the results.", show_default=f"{FOLDER}/NAME.jsonl")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again the cells that have results already.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help=WORKERS, show_default="1; with --ray, one for each GPU or machine")
    ] = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help=RAY)] = None,
    kvpress: Annotated[
        str | None, typer.Option(metavar="PYTHON", help=KVPRESS, show_default="$KVKEEP_KVPRESS_PYTHON")
    ] = None,
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Run an experiment. You can stop it at any time: the same command continues with the missing cells."""
    check_name(experiment)
    try:
        from kvkeep_lab.experiment import Experiment, load_experiment
        from kvkeep_lab.peers.kvpress import PYTHON
        from kvkeep_lab.runner import run as measure
        from kvkeep_lab.store import ResultFile

        if kvpress is not None:
            os.environ[PYTHON] = kvpress  # child processes need it too
        chosen = load_experiment(experiment)
        if smoke:
            full, chosen = chosen, chosen.smoked()
            sizes = f"from {len(full.cells(''))} to {len(chosen.cells(''))} cells"
            note(f"--smoke shrinks '{chosen.name}' {sizes}: fewer methods and budgets, smaller texts.")
        chosen = chosen.with_(models=model) if model else chosen
        if budget and not isinstance(chosen, Experiment):
            raise UsageError(f"Experiment '{chosen.name}' is a study, which has no budgets; leave --budget out.")
        for name in budget or []:
            if isinstance(chosen, Experiment) and name not in chosen.budgets:
                raise unknown(f"budget of experiment '{chosen.name}'", name, chosen.budgets)
        cells = chosen.cells("")
        methods = list(dict.fromkeys(cell.method for cell in cells))
        for name in set(only or []) - set(methods):
            raise unknown(f"method of experiment '{chosen.name}'", name, methods)
        results = ResultFile(store or FOLDER / f"{chosen.name}{'-smoke' if smoke else ''}.jsonl")
        with _progress() as progress:
            given: dict[str, Any] = {"fresh": fresh, "device": device, "workers": workers, "ray": ray}
            wanted: dict[str, Any] = {"only": only or [], "budgets": budget or [], "at": _axes(chosen.name, at, cells)}
            tally = measure(chosen, results, data, **wanted, progress=progress, notify=note, **given)
    except KeyboardInterrupt:
        raise Stopped("Stopped. The finished cells are saved; run the same command again to continue.") from None
    results.refresh()
    _note_torn(results)
    _print_tally(chosen.name, results.path, tally, json)


def _axes(name: str, given: Sequence[str] | None, cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return the values by axis of texts like "question=seen". Raises UsageError if no cell has an axis or a value."""
    known, wanted = dict[str, list[str]](), dict[str, list[str]]()
    for cell in cells:
        for axis, value in cell.place.items():
            known.setdefault(axis, []).append(value)
    for text in given or ():
        axis, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--at takes an axis and a value, such as seed=0, not '{text}'.")
        if axis not in known:
            raise unknown(f"axis of experiment '{name}'", axis, list(known))
        if value not in known[axis]:
            raise unknown(f"{axis} of experiment '{name}'", value, list(dict.fromkeys(known[axis])))
        wanted.setdefault(axis, []).append(value)
    return wanted


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that updates a progress bar."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    left = TextColumn("left"), TimeRemainingColumn()
    options: dict[str, Any] = {"console": err, "transient": True, "disable": not err.is_terminal}
    with (
        Progress(*columns, *left, speed_estimate_period=_PACE, **options) as bar,
        redirect_stdout(sys.stderr),
    ):  # Ray prints to stdout
        line = bar.add_task("", total=None)
        yield lambda label, done, total: bar.update(line, description=label, completed=done, total=total)


def _print_tally(name: str, store: Path, tally: Tally, json: bool) -> None:
    if json:
        fields = {"model", "method", "budget", "point", "seed", "error"}
        failed = [record.model_dump(mode="json", include=fields) for record in tally.failed]
        print_json({"experiment": name, "store": str(store), **asdict(tally), "failed": failed})
    else:
        for sentence in dict.fromkeys(f"{record.label} failed: {record.error}" for record in tally.failed):
            note(sentence)
        note(
            f"{tally.done} cells measured, {tally.found} had results already, {len(tally.failed)} failed, "
            f"{tally.elsewhere} belong to another run. See: kvkeep lab report {store}"
        )
    if tally.failed and not tally.done + tally.found:
        raise KvkeepError(f"No cell of '{name}' could be measured; see '{store}' for the reasons.")


@app.command()
def report(
    stores: Annotated[list[Path], typer.Argument(help="Files of results from 'kvkeep lab run'.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for report.html, report.md and the figures (PNG and SVG)."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Report results as Markdown or as a page: first the differences from the papers, then all tables. A
    report of a single experiment begins with that experiment."""
    from kvkeep_lab.report import groups, markdown, unmeasured, unread, write
    from kvkeep_lab.report.studies import StudyGroup
    from kvkeep_lab.store import ResultFile

    read = [ResultFile(path) for path in stores]
    for one in read:
        if one.path.is_dir():
            raise UsageError(f"'{one.path}' is a folder; name files of results in it, such as {one.path}/*.jsonl.")
        if not one.path.is_file():
            raise UsageError(f"There are no results at '{one.path}'; 'kvkeep lab run' writes them.")
        one.refresh()
        _note_torn(one)
    found, foreign = groups(read), unread(read)
    for chapter in foreign:
        note(" ".join(chapter.missing))
    if not found:
        raise UsageError("There is nothing to report: these results hold no readable cell of an experiment.")
    chapters = [group.chapter() for group in found]
    names = {group.experiment.name for group in found}
    chapters += [*foreign, *(unmeasured(names) if len(names) > 1 else ())]  # a report of one experiment lists no others
    files = write(chapters, output) if output is not None else []
    if json:
        sections = [
            [group.as_dict() for group in found if isinstance(group, StudyGroup) is study] for study in (False, True)
        ]
        verdicts = [{"title": one.title, **asdict(verdict)} for one in chapters for verdict in one.verdicts]
        print_json(
            {
                "sections": sections[0],
                "studies": sections[1],
                "verdicts": verdicts,
                "files": [str(path) for path in files],
            }
        )
    elif output is None:
        print(markdown(chapters), end="")
    for path in files:
        note(f"Written: {path}")


def _note_torn(store: ResultFile) -> None:
    if store.torn or store.unfinished:
        count = store.torn + store.unfinished
        note(f"{count} line{'s' if count > 1 else ''} of '{store.path}' cannot be read and were skipped.")
