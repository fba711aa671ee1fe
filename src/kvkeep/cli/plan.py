"""``kvkeep plan``: the bytes of every method for a model and a context, without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvkeep.budget import Budget, bytes_of, size
from kvkeep.cli import options
from kvkeep.cli.options import split_list
from kvkeep.cli.output import note, out, print_json, show
from kvkeep.cli.startup import fetch_model, startup
from kvkeep.errors import KvkeepError
from kvkeep.policies.names import check_names
from kvkeep.stores.checkpoints.spec import CheckpointSpec

if TYPE_CHECKING:
    from kvkeep.plan.fitting import Row

QUALITY = (
    "Bytes say nothing about quality: exact methods give the answers of 'full', and 'kvkeep compare' measures how far "
    "from them each other method is on your text."
)


def plan(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model, or a config.json alone; no weights are loaded.")
    ] = "smollm2",
    context: Annotated[int, typer.Option("--context", "-n", min=1, help="Tokens of the text.")] = 4096,
    budget: Annotated[
        str,
        typer.Option(
            "--budget", "-b", help="Cache budget: entries per layer (512), bytes (64MB), or a share of the context."
        ),
    ] = "12.5%",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for caches, in addition to the weights (64MB).", show_default="half of the free memory"
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-x",
            help="Methods to plan for; separate several by commas, or repeat the option.",
            show_default="every method with a name",
            autocompletion=options.complete_methods,
        ),
    ] = None,
    checkpoint: options.Checkpoint = None,
    where: options.Where = None,
    weights: options.Weights = "auto",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Show how many bytes every method takes for a text, and which caches fit in memory."""
    Budget.parse(budget)
    given = split_list(method, "--method") if method else []
    for name in given:
        check_names(name)
    CheckpointSpec.parse(checkpoint or "kv", where or "host")
    options.check_model(model, weights, device, config=True)
    amount = None if memory is None else bytes_of(memory)
    with startup():
        import torch

        from kvkeep.geometry import ModelGeometry
        from kvkeep.models.loading import describe
        from kvkeep.models.weight_memory import free_memory
        from kvkeep.plan.fitting import Choice, choose, listed
        from kvkeep.plan.fitting import plan as run
        from kvkeep.policies.methods import resolve

    methods = given or listed()
    for name in given:
        resolve(name)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if amount is None:
        amount = free_memory(torch.device(place)) // 2
    fetch_model(model)
    described = describe(model, weights=weights, device=place, progress=note)
    geometry = ModelGeometry.from_config(described.config, described.dtype.itemsize)
    kind = torch.device(place).type
    rows, left_out = run(geometry, context, amount, budget, methods, device=kind, checkpoint=checkpoint, where=where)
    try:
        automatic = choose(geometry, context, amount, shared=kind == "cpu")
    except KvkeepError as error:
        automatic = Choice({}, str(error))
    if json:
        found = {
            "model": model,
            "context": context,
            "memory_bytes": amount,
            "weight_bytes": described.weight_bytes,
            "rows": [row.as_dict() for row in rows],
            "left_out": left_out,
            "auto": asdict(automatic),
        }
        print_json(found)
        return
    note(f"{context:,} tokens, budget {budget}; the weights take {size(described.weight_bytes)} in addition")
    show(_table(rows, amount))
    out.print(f"With --budget auto: {automatic.reason}")
    out.print(QUALITY)
    for why in dict.fromkeys(left_out.values()):
        names = ", ".join(name for name, other in left_out.items() if other == why)
        note(f"left out ({names}): {why}")


def _table(rows: Sequence[Row], memory: int) -> Table:
    table = Table(box=None, header_style="bold")
    headings = ("cache", "exactness", "entries", "bytes", "checkpoint", "peak", f"fit in {size(memory)}")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("cache", "exactness") else "right")
    for row in rows:
        stored = row.sizes.device + row.sizes.host + row.sizes.disk
        table.add_row(
            row.method.name,
            str(row.method.exactness),
            "all" if row.method.selector.keeps_all else f"{row.sizes.budget:,}",
            size(row.sizes.resident + row.sizes.compressed),
            "-" if row.spec is None else f"{size(stored)} {row.spec}@{row.spec.where}",
            size(row.peak),
            f"{row.fitting:,}" if row.fitting else "no",
        )
    return table
