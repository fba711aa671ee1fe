"""``kvkeep capacity``: sessions that fit on a machine, and the required network rates, by method and length."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvkeep.budget import Budget, bytes_of
from kvkeep.cli import completion, options
from kvkeep.cli.options import split_list
from kvkeep.cli.output import note, out, print_json, show
from kvkeep.cli.planning import shape_and_rates
from kvkeep.cli.startup import startup
from kvkeep.errors import UsageError
from kvkeep.units import size

if TYPE_CHECKING:
    from kvkeep.plan.machine import Machine
    from kvkeep_lab.capacity import Capacity, Rebuilding

CACHES = (*("full", "quantized:4", "h2o", "kv-direct kv@host", "kv-direct residual@device", "snapkv+verified kv@host"),)
"""Caches to compare by default: all entries, all in four bits, a part of them, and all with a part in memory."""
KEEPS_ALL, PROJECTS = "full", "kv-direct residual@device"
"""Caches of the sentences below the tables: attention to all entries, and projected residuals."""
SESSIONS = (1, 8, 64)
"""Numbers of sessions for which the sentence gives the length where attention takes more than half of a step."""


def capacity(
    model: Annotated[str, typer.Option("--model", "-m", help="A model, or a config.json; no weights.")] = "smollm2",
    context: Annotated[
        str,
        typer.Option("--context", "-n", help="Tokens of a session, including its answer; separate several by commas."),
    ] = "8192",
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-x",
            help="Caches, named as in 'kvkeep plan' (h2o, 'kv-direct kv@host'). Separate several by commas, or "
            "repeat the option.",
            show_default="one of each kind",
            autocompletion=completion.methods,
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            "-b",
            help="Cache budget of each session: entries per layer (4096), bytes (64MB), or a share (25%).",
        ),
    ] = "4096",
    machine: Annotated[
        str | None, typer.Option(help="A file of another machine's rates.", show_default="this machine")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for all caches (64GB).", show_default="nine tenths of the device's memory, minus the weights"
        ),
    ] = None,
    gbit: Annotated[
        str,
        typer.Option(help="Speeds of networks over which sessions are fetched, in Gbit/s; separate several by commas."),
    ] = ("1,10,100"),
    answer: Annotated[int, typer.Option(min=1, help="Number of tokens in an answer.")] = 256,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="Share of drafted tokens that are accepted.")] = 0.95,
    weights: options.Weights = "auto",
    json: options.Json = False,
) -> None:
    """Predict how many sessions fit in a machine, how fast it serves them, and how long it takes to fetch one."""
    Budget.parse(budget)
    options.check_model(model, weights, config=True)
    given_bytes = None if memory is None else bytes_of(memory)
    contexts, networks = _numbers(context, "context", whole=True), _numbers(gbit, "network")
    with startup():
        from kvkeep.plan.candidates import Candidate
        from kvkeep_lab import capacity as planned

        names = list(CACHES) if method is None else split_list(method, "--method") or ["none"]
        caches, keeps_all, projects = [*map(Candidate.parse, names)], *map(Candidate.parse, (KEEPS_ALL, PROJECTS))
        shape, rates = shape_and_rates(model, machine, weights)
    available = rates.cache_bytes(shape.weight_bytes) if given_bytes is None else given_bytes
    found = [
        one
        for tokens in contexts
        for one in planned.capacities(
            shape, rates, available, int(tokens), budget, caches, answer=answer, acceptance=acceptance, tell=note
        )
    ]  # fmt: skip
    if not found:
        raise UsageError("No method can be planned with this budget and context; give other methods or another budget.")
    rebuilt = [planned.rebuilding(shape, rates, projects, int(tokens)) for tokens in contexts]
    balances = {count: planned.balance(shape, rates, keeps_all, count) for count in SESSIONS}
    if json:
        fetched = [{f"{rate:g}": one.fetched(rate * planned.GBIT) for rate in networks} for one in found]
        rows = [one.as_dict() | {"fetched_s": times} for one, times in zip(found, fetched, strict=True)]
        rebuilding = [asdict(one) | {"pays_below_bytes_s": one.pays_below} for one in rebuilt]
        given = {"model": model, "memory_bytes": available, "weight_bytes": shape.weight_bytes, "machine": rates.name}
        given["rates"] = rates.source
        print_json(given | {"rows": rows, "rebuilding": rebuilding, "balance_tokens": balances})
        return
    note(f"{rates.name} ({rates.source}); weights {size(shape.weight_bytes)}, {size(available)} for caches")
    show(_carried(found))
    out.print()
    show(_fetched(found, networks, rates))
    out.print()
    for one in rebuilt:
        out.print(_projected(one), soft_wrap=True)
    for count, tokens in balances.items():
        out.print(
            f"With {count} sessions in a step, attention takes more than half of it above {tokens:,.0f} tokens each.",
            soft_wrap=True,
        )


def _numbers(text: str, what: str, whole: bool = False) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number < 1e12 and (not whole or number.is_integer()) for number in found):
        kind = "whole numbers" if whole else "numbers"
        raise UsageError(f"A {what} of '{text}' is not understood: give {kind} above 0, separated by commas.")
    return found


def _carried(found: list[Capacity]) -> Table:
    table = Table(box=None, header_style="bold")
    headings = (
        "held",
        "granted",
        "elsewhere",
        "sessions",
        "tokens/s each",
        "tokens/s in all",
        "weights %",
        "prompt (s)",
    )
    for heading in ("tokens", "cache", "class", *headings):
        table.add_column(heading, justify="left" if heading in ("cache", "class") else "right")
    for one in found:
        away = one.sizes.host + one.sizes.disk
        table.add_row(
            f"{one.sizes.tokens:,}",
            str(one.candidate),
            str(one.candidate.method.exactness),
            size(one.idle),
            size(one.granted),
            size(away) if away else "-",
            f"{one.sessions:,}",
            f"{1 / one.single.step:,.3g}",
            f"{one.rate:,.0f}" if one.rate > 10 else f"{one.rate:.2g}",
            "-" if one.fixed_share is None else f"{100 * one.fixed_share:.0f}",
            f"{one.single.prefill:.3g}",
        )
    return table


def _fetched(found: list[Capacity], networks: list[float], machine: Machine) -> Table:
    from kvkeep_lab.capacity import GBIT

    table = Table(box=None, header_style="bold")
    speeds = [f"{rate:g} Gbit/s" for rate in networks]
    headings = (
        "tokens",
        "cache",
        "session size",
        *speeds,
        "disk",
        "read again",
        "worth it from (Gbit/s)",
        "bytes moved per token",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for one in found:
        times = [one.fetched(rate * GBIT) for rate in networks] + [one.fetched(machine.disk), one.single.prefill]
        table.add_row(
            f"{one.sizes.tokens:,}",
            str(one.candidate),
            size(one.sizes.total),
            *(f"{seconds:.3g} s" for seconds in times),
            f"{one.pays_from / GBIT:.3g}",
            size(int(one.single.moved)) if one.single.moved else "-",
        )
    return table


def _projected(one: Rebuilding) -> str:
    from kvkeep_lab.capacity import GBIT

    return (
        f"{one.tokens:,} tokens are {size(one.entries)} of entries or {size(one.residuals)} of residuals; projecting "
        f"residuals on the device takes {one.seconds:.3g} s, as long as fetching the entries at "
        f"{one.pays_below / GBIT:.3g} Gbit/s."
    )
