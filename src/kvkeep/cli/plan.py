"""``kvkeep plan``: predicts bytes and seconds of every cache, without loading weights."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvkeep.budget import Budget, bytes_of
from kvkeep.cli import options
from kvkeep.cli.output import note, out, print_json, show
from kvkeep.cli.planning import shape_and_rates
from kvkeep.cli.startup import startup
from kvkeep.errors import UsageError
from kvkeep.extras import optional
from kvkeep.units import size, three_digits

if TYPE_CHECKING:
    from kvkeep.plan.planner import Planned

BUDGET = "12.5%"
"""Default budget of the caches that --check measures."""


def plan(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model, or a config.json alone. Only --check loads the weights.")
    ] = "smollm2",
    context: Annotated[
        str, typer.Option("--context", "-n", help="Tokens of the prompt; --check takes several, separated by commas.")
    ] = "4096",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for the cache, in addition to the weights (64MB).", show_default="half of the free memory"
        ),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Show exact methods only.")] = False,
    acceptance: Annotated[
        float, typer.Option(help="Assumed share of drafted tokens that verification accepts.")
    ] = 0.95,
    answer: Annotated[int, typer.Option(min=1, help="Number of tokens in the answer.")] = 256,
    machine: Annotated[
        str | None, typer.Option(help="JSON file with the rates of another machine.", show_default="this machine")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Show every cache. By default the table shows the best ones only: those for which no other needs less "
            "memory and less time.",
        ),
    ] = False,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Draw a figure and save it to this file (.png, .svg or .pdf).")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Measure every cache and compare it with its prediction.")
    ] = False,
    budget: Annotated[
        str | None, typer.Option("--budget", "-b", help="With --check: cache budget.", show_default=BUDGET)
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="With --check: measure only caches whose names contain one of these words, separated by commas."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="With --check: number of measurements of each cache.")] = 1,
    weights: options.Weights = "auto",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Predict bytes and times of every cache that fits in a memory, and recommend one."""
    contexts = _contexts(context)
    if len(contexts) > 1 and not check:
        raise UsageError("A plan takes one context, and only --check takes several; give one, or add --check.")
    if budget is not None and not check:
        raise UsageError("A plan tries every budget, and only --check takes one; leave --budget out, or add --check.")
    if check and machine is not None:
        raise UsageError("A prediction for another machine cannot be checked on this machine; leave --machine out.")
    if output is not None:
        optional("kvkeep_lab.figures", "lab").check_figure(output)
    Budget.parse(budget)
    options.check_model(model, weights, None if machine is not None else device, config=True)
    amount = None if memory is None else bytes_of(memory)
    with startup():
        from kvkeep.plan.planner import plan as run

        place = _device(device)
        shape, rates = shape_and_rates(model, machine, weights, place)
    if check:
        from kvkeep.plan.rates import machine_here

        checks = optional("kvkeep_lab.cli.checked_plan", "lab")
        loaded = options.ModelOptions(model, weights, device).load()
        rates = machine_here(place, loaded.model.dtype)
        checks.check_plan(loaded, shape, rates, contexts, budget or BUDGET, only, rounds, json=json)
        return
    if amount is None:
        amount = _free(place) if machine is None else rates.cache_bytes(shape.weight_bytes)
    planned = run(shape, rates, contexts[0], amount, exact=exact, acceptance=acceptance, answer=answer)
    if output is not None:
        optional("kvkeep_lab.plan_figure", "lab").draw_plan(planned, output, model=model)
    if json:
        print_json(_as_json(planned, model, output))
    else:
        _print(planned, everything, output)


def _print(planned: Planned, everything: bool, output: str | None) -> None:
    machine = planned.machine
    note(f"{machine.name} ({machine.source}); the weights take {size(planned.shape.weight_bytes)} in addition")
    show(_table(planned, everything))
    out.print(
        "* recommended" + (", + on the frontier: no other cache needs less memory and less time" if everything else "")
    )
    out.print(planned.reason)
    if output is not None:
        note(f"The figure is saved in {output}.")


def _contexts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise UsageError(f"A context of '{text}' is not understood: give a whole number of tokens (4096).")
    return [int(part) for part in parts]


def _device(device: str | None) -> str:
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def _free(device: str) -> int:
    """Return half of the free bytes of a device."""
    import torch

    from kvkeep.models.weight_memory import free_memory

    return free_memory(torch.device(device)) // 2


def _as_json(planned: Planned, model: str, output: str | None) -> dict[str, Any]:
    return {
        "model": model,
        "context": planned.context,
        "memory_bytes": planned.memory,
        "answer": planned.answer,
        "weight_bytes": planned.shape.weight_bytes,
        "machine": asdict(planned.machine),
        "rows": [row.as_dict() for row in planned.rows],
        "recommended": planned.best.as_dict(),
        "reason": planned.reason,
        "figure": output,
    }


def _table(planned: Planned, everything: bool) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in ("cache", "class", "entries", "memory", "elsewhere", "prompt (s)", "token (ms)", "drafts"):
        table.add_column(heading, justify="left" if heading in ("cache", "class") else "right")
    shared = planned.machine.shared
    for row in planned.rows:
        if not (everything or row.frontier or row is planned.best):
            continue
        elsewhere = row.sizes.disk + (0 if shared else row.sizes.host)
        mark = " *" if row is planned.best else " +" if row.frontier and everything else ""
        table.add_row(
            f"{row.candidate}{mark}",
            str(row.exactness),
            "all" if row.candidate.keeps_all else f"{row.budget:,}",
            size(row.memory),
            size(elsewhere) if elsewhere else "-",
            three_digits(row.cost.prefill),
            three_digits(1e3 * row.cost.step),
            f"{row.cost.drafts or '-'}",
        )
    return table
