"""``kvkeep lab``: experiments beside the papers': list them, run them, report what they found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import err, note, print_json, show
from kvkeep.errors import KvkeepError, Stopped, UsageError

if TYPE_CHECKING:
    from kvkeep.lab.experiment import Experiment
    from kvkeep.lab.store import Store

FOLDER = Path("kvkeep-lab")

app = typer.Typer(
    help="Experiments that stand beside the papers': list them, run them, report what they found.",
    no_args_is_help=True,
)


@app.callback()
def _lab() -> None:
    for package in ("pydantic", "filelock"):
        if find_spec(package) is None:
            raise UsageError(f"The lab needs the package '{package}', which is missing: pip install 'kvkeep[lab]'.")


@app.command("list")
def list_(json: options.Json = False) -> None:
    """List the experiments that come with the library, the tasks they are made of, and whom else they may ask."""
    from kvkeep.lab.experiment import load_experiment, packaged
    from kvkeep.lab.peers import PEERS
    from kvkeep.lab.tasks import TASKS

    found = [load_experiment(name) for name in packaged()]
    if json:
        about = {
            name: {"about": task.about, "sizes": task.model_json_schema()["properties"]} for name, task in TASKS.items()
        }
        peers = {name: {"about": peer.about, "needs": peer.needs} for name, peer in PEERS.items()}
        print_json({"experiments": [one.model_dump(mode="json") for one in found], "tasks": about, "peers": peers})
        return
    table = Table(box=None, header_style="bold", title="Experiments", title_justify="left", title_style="bold")
    for heading in ("name", "title", "task", "beside", "cells"):
        table.add_column(heading, overflow="fold")
    for one in found:
        beside = "-" if one.paper is None else f"{one.paper.title.partition(':')[0]}, {one.paper.where}"
        table.add_row(one.name, one.title, one.task.name, beside, str(len(one.cells(""))))
    show(table)
    tasks = Table(box=None, header_style="bold", title="\nTasks", title_justify="left", title_style="bold")
    for heading in ("name", "about", "sizes"):
        tasks.add_column(heading, overflow="fold")
    for name, task in TASKS.items():
        tasks.add_row(name, task.about, ", ".join(task.model_fields))
    show(tasks)
    others = Table(box=None, header_style="bold", title="\nPeers", title_justify="left", title_style="bold")
    for heading in ("name", "about", "needs"):
        others.add_column(heading, overflow="fold")
    for name, peer in PEERS.items():
        others.add_row(name, peer.about, peer.needs or "-")
    show(others)


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="A name of 'kvkeep lab list', or the path of a .toml file.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="The folder with the data: haystack/*.txt, xsum_*.jsonl, ...")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The smallest sizes, to see that everything works.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", "-x", help="Measure this method only; may be repeated.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="Other models than the experiment's; may be repeated.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option("--store", help=f"The file of results. [default: {FOLDER}/NAME.jsonl]")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
    kvpress: Annotated[
        str | None,
        typer.Option(
            "--kvpress", metavar="PYTHON", help="The interpreter that has kvpress. [default: $KVKEEP_KVPRESS_PYTHON]"
        ),
    ] = None,
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Run an experiment. Only missing cells are measured, so it may be stopped, and gone on with, at any time."""
    with _stoppable():
        from kvkeep.lab.experiment import load_experiment
        from kvkeep.lab.peers.kvpress import PYTHON
        from kvkeep.lab.runner import run as measure
        from kvkeep.lab.store import Store

        if kvpress is not None:
            os.environ[PYTHON] = kvpress  # for processes that this one may start, too
        chosen = load_experiment(experiment)
        chosen = chosen.smoked() if smoke else chosen
        chosen = chosen.with_(models=model) if model else chosen
        _check_only(chosen, only or [])
        results = Store(store or FOLDER / f"{chosen.name}{'-smoke' if smoke else ''}.jsonl")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(
            *columns,
            TextColumn("left"),
            TimeRemainingColumn(),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        ) as bar:
            line = bar.add_task("", total=None)
            tally = measure(
                chosen,
                results,
                data,
                only=only or [],
                fresh=fresh,
                device=device,
                progress=lambda label, done, total: bar.update(line, description=label, completed=done, total=total),
                tell=note,
            )
    results.refresh()
    _tell_torn(results)
    if json:
        failed = [
            {"method": row.method, "budget": row.budget, "point": row.point, "error": row.error} for row in tally.failed
        ]
        print_json({"experiment": chosen.name, "store": str(results.path), **asdict(tally), "failed": failed})
    else:
        for sentence in dict.fromkeys(_failure(row.method, row.budget, row.error) for row in tally.failed):
            note(sentence)
        note(
            f"{tally.done} cells measured, {tally.found} were there, {len(tally.failed)} failed, {tally.elsewhere} are "
            f"another run's. See: kvkeep lab report {results.path}"
        )
    if tally.failed and not tally.done + tally.found:
        raise KvkeepError(f"No cell of '{chosen.name}' could be measured; the reasons are in '{results.path}'.")


@app.command()
def report(
    stores: Annotated[list[Path], typer.Argument(help="Files of results that 'kvkeep lab run' wrote.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A folder for report.md and its figures (PNG and SVG).")
    ] = None,
    json: options.Json = False,
) -> None:
    """Report what stores hold: a table for each experiment and model, as Markdown, the paper's numbers beside."""
    from kvkeep.lab.report import markdown, sections, write
    from kvkeep.lab.store import Store

    read = [Store(path) for path in stores]
    for one in read:
        if not one.path.is_file():
            raise UsageError(f"There are no results at '{one.path}'; 'kvkeep lab run' writes them.")
        one.refresh()
        _tell_torn(one)
    found = sections(read)
    files = write(found, output) if output is not None else []
    if json:
        print_json({"sections": [section.as_dict() for section in found], "files": [str(path) for path in files]})
    elif output is None:
        print(markdown(found), end="")
    for path in files:
        note(f"Written: {path}")


def _check_only(experiment: Experiment, only: list[str]) -> None:
    from kvkeep.errors import unknown

    methods = (experiment.baseline, *experiment.methods)
    for name in only:
        if name not in methods:
            raise unknown(f"method of experiment '{experiment.name}'", name, methods)


def _failure(method: str, budget: str | None, error: str) -> str:
    return f"{method}{f' at {budget}' if budget else ''} failed: {error}"


def _tell_torn(store: Store) -> None:
    if store.torn or store.unfinished:
        count = store.torn + store.unfinished
        note(f"{count} line{'s' if count > 1 else ''} of '{store.path}' cannot be read, and counted for nothing.")


@contextmanager
def _stoppable() -> Iterator[Any]:
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped("Stopped; what was measured is kept, and the same command goes on from there.") from None
