"""``kvkeep lab fleet``: a fleet of replicas, simulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.options import split_list
from kvkeep.cli.output import err, note, print_json, show
from kvkeep.cli.planning import shape_and_rates
from kvkeep.errors import UsageError, unknown
from kvkeep.units import size

if TYPE_CHECKING:
    from kvkeep_lab.fleet.outcome import FleetOutcome
    from kvkeep_lab.fleet.pace import ReplicaPace
    from kvkeep_lab.fleet.scenario import Scenario


def fleet(
    pace: Annotated[
        Path | None,
        typer.Option(
            "--pace", help="JSON file with the pace of one replica, used in place of the planner's prediction."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="For the planner: model, or a config.json alone.")
    ] = "smollm2",
    machine: Annotated[
        str | None, typer.Option(help="For the planner: JSON file with the rates or the data sheet of a machine.")
    ] = None,
    method: Annotated[
        str, typer.Option("--method", "-x", help="For the planner: cache, named as in 'kvkeep plan'.")
    ] = ("full"),
    budget: Annotated[
        str, typer.Option("--budget", "-b", help="For the planner: cache budget of every session.")
    ] = "4096",
    memory: Annotated[
        str | None,
        typer.Option(
            help="For the planner: memory for all caches of a replica.",
            show_default="nine tenths of the device's memory, minus the weights",
        ),
    ] = None,
    chunk: Annotated[
        int,
        typer.Option(
            min=1, help="For the planner: prompt tokens that are read in one step while other sessions generate."
        ),
    ] = 512,
    replicas: Annotated[
        list[str] | None, typer.Option(help="Number of replicas; separate several by commas.", show_default="8")
    ] = None,
    route: Annotated[
        list[str] | None,
        typer.Option(
            help="Routing of sessions to replicas: hash, bounded or least; separate several by commas.",
            show_default="hash",
        ),
    ] = None,
    recall: Annotated[
        list[str] | None,
        typer.Option(
            help="How a replica restores a session: fetch its cache, read its text again, or whichever is faster "
            "(fetch, read, faster); separate several by commas.",
            show_default="fetch",
        ),
    ] = None,
    rate: Annotated[float, typer.Option(help="New sessions per second for each replica.")] = 0.05,
    burst: Annotated[
        int,
        typer.Option(
            min=0, help="Start this number of sessions at once, and again when all have ended, in place of --rate."
        ),
    ] = 0,
    turns: Annotated[float, typer.Option(min=1, help="Mean number of turns of a session.")] = 8,
    first: Annotated[float, typer.Option(min=1, help="Mean number of tokens of a session's first prompt.")] = 2000,
    prompt: Annotated[float, typer.Option(min=1, help="Mean number of tokens of a later prompt.")] = 200,
    answer: Annotated[float, typer.Option(min=1, help="Mean number of tokens of an answer.")] = 300,
    think: Annotated[float, typer.Option(min=0, help="Mean seconds between an answer and the next turn.")] = 30,
    fixed: Annotated[
        bool,
        typer.Option(
            "--fixed", help="Give every length its mean; by default lengths are drawn from an exponential distribution."
        ),
    ] = False,
    disk: Annotated[str, typer.Option(help="Bytes per second of the disk that all replicas share.")] = "20GB",
    link: Annotated[float, typer.Option(min=0.001, help="Network speed of each replica in Gbit/s.")] = 100,
    mtbf: Annotated[
        float | None, typer.Option(min=1, help="Mean seconds until a replica fails; without it, replicas never fail.")
    ] = None,
    restart: Annotated[float, typer.Option(min=0, help="Seconds until a failed replica is back.")] = 60,
    notice: Annotated[float, typer.Option(min=0.001, help="Seconds until the clients of a failed replica retry.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Simulated time in seconds.")] = 600,
    warmup: Annotated[float, typer.Option(min=0, help="Seconds at the beginning that the results leave out.")] = 120,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    json: options.Json = False,
) -> None:
    """Simulate a fleet of replicas: routing, parked sessions, failures, tail latency. One row for each combination."""
    from kvkeep.budget import bytes_of
    from kvkeep_lab.capacity import GBIT
    from kvkeep_lab.fleet.pace import ReplicaPace
    from kvkeep_lab.fleet.scenario import RECALLS, ROUTES, Scenario
    from kvkeep_lab.fleet.simulation import simulate

    counts = _counts(replicas or ["8"])
    routes, recalls = _known(route, ROUTES, "--route"), _known(recall, RECALLS, "--recall")
    given: dict[str, Any] = {"rate": rate, "burst": burst, "turns": turns, "first": first, "prompt": prompt}
    given |= {
        "answer": answer,
        "think": think,
        "fixed": fixed,
        "disk": float(bytes_of(disk, "disk")),
        "link": link * GBIT,
    }
    given |= {"mtbf": mtbf, "restart": restart, "notice": notice, "seconds": seconds, "warmup": warmup, "seed": seed}
    one = ReplicaPace.load(pace) if pace is not None else _planned(model, machine, method, budget, memory, chunk)
    combined: list[Any] = [*product(counts, routes, recalls)]
    scenarios = [Scenario(count, route=how, recall=back, **given) for count, how, back in combined]
    found: list[tuple[Scenario, FleetOutcome]] = []
    with _progress(len(scenarios) * seconds) as progress:
        for number, scenario in enumerate(scenarios):
            found.append((scenario, simulate(one, scenario, partial(progress, number * seconds))))
    if json:
        rows = [
            {"replicas": scenario.replicas, "route": scenario.route, "recall": scenario.recall, **outcome.as_dict()}
            for scenario, outcome in found
        ]
        print_json({"pace": one.as_dict(), "scenario": given, "rows": rows})
        return
    note(one.name)
    show(_table(found))


def _planned(model: str, machine: str | None, method: str, budget: str, memory: str | None, chunk: int) -> ReplicaPace:
    from kvkeep.budget import Budget, bytes_of
    from kvkeep_lab.fleet.pace import ReplicaPace

    shape, rates = shape_and_rates(model, machine)
    note(f"{rates.name} ({rates.source})")
    entries = Budget.parse(budget).entries(shape.geometry, context=shape.geometry.max_positions)
    memory_bytes = bytes_of(memory) if memory is not None else rates.cache_bytes(shape.weight_bytes)
    return ReplicaPace.planned(shape, rates, memory_bytes, method, entries, chunk)


def _counts(texts: list[str]) -> list[int]:
    found = split_list(texts, "--replicas")
    if not found or not all(text.isdecimal() and int(text) for text in found):
        raise UsageError(f"--replicas takes whole numbers of at least 1, not '{','.join(texts)}'.")
    return [int(text) for text in found]


def _known(texts: list[str] | None, known: tuple[str, ...], option: str) -> list[str]:
    found = split_list(texts or [known[0]], option)
    for text in found or ["none"]:
        if text not in known:
            raise unknown(option.strip("-"), text, known)
    return found


@contextmanager
def _progress(total: float) -> Iterator[Any]:
    columns = TextColumn("simulating"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda before, now: bar.update(task, completed=before + now)


def _table(found: list[tuple[Scenario, FleetOutcome]]) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in ("replicas", "route", "recall"):
        table.add_column(heading, justify="right" if heading == "replicas" else "left", no_wrap=True)
    headings = ("first token s, 50/95/99 %", "between ms, 50/95/99 %", "after a failure s", "tokens/s")
    for heading in (
        *headings,
        "refused",
        "under way",
        "busy %",
        "in memory %",
        "fetched %",
        "read again %",
        "disk read/s",
        "written/s",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for scenario, outcome in found:
        table.add_row(
            f"{scenario.replicas:,}",
            scenario.route,
            scenario.recall,
            _three(outcome.first_token),
            _three(outcome.gap, 1e3),
            _three(outcome.recovered),
            f"{outcome.tokens_s:,.0f}",
            f"{outcome.refused:,}",
            f"{outcome.left:,}",
            f"{100 * outcome.busy:.0f}",
            *(f"{100 * outcome.share(how):.1f}" for how in ("in memory", "fetched", "read again")),
            size(int(outcome.read_bytes_s)),
            size(int(outcome.written_bytes_s)),
        )
    return table


def _three(values: tuple[float, float, float] | None, scale: float = 1.0) -> str:
    return "-" if values is None else " / ".join(f"{scale * value:.3g}" for value in values)
