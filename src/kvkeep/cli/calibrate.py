"""``kvkeep calibrate``: measure the rates of this machine, with which plans predict times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import err, note, out, print_json, show
from kvkeep.cli.startup import startup
from kvkeep.errors import unknown
from kvkeep.plan.background import PASSIVE

if TYPE_CHECKING:
    from kvkeep.plan.machine import Machine

DTYPES = ("bfloat16", "float32", "float16")


def calibrate(
    dtype: Annotated[
        str,
        typer.Option(
            help="Precision of the computation: bfloat16 (for GGUF files and packed weights), float32 or float16."
        ),
    ] = "bfloat16",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Measure this machine in less than a minute, and keep its rates for plans.

    Until then predicted times are estimates from the processor's instruction set. Close other programs first.
    """
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    os.environ.setdefault(*PASSIVE)
    with startup():
        import torch

        from kvkeep.plan.calibrate import measure_here
        from kvkeep.plan.estimate import busy, described, estimated
        from kvkeep.plan.machine import Machine

    place, kind = device or ("cuda" if torch.cuda.is_available() else "cpu"), getattr(torch, dtype)
    note(f"Measuring {described(place, kind)}; this takes less than a minute ...")
    if busy():
        note("Other programs are using this machine, so the measured rates will be too low.")
    start = time.monotonic()
    with err.status("") as status:
        path = measure_here(place, kind, lambda part: status.update(f"measuring {part}"))
    seconds, machine = time.monotonic() - start, Machine.load(path)
    if json:
        print_json({"machine": asdict(machine), "seconds": seconds, "path": str(path)})
        return
    show(_table(machine, estimated(place, kind)))
    out.print(f"Measured in {seconds:.0f} s and kept in {path}; plans use these rates from now on.", soft_wrap=True)


def _table(machine: Machine, guess: Machine) -> Table:
    """Return a table of the most important rates and the estimates that they replace."""
    table = Table(box=None, header_style="bold")
    table.add_column("")
    for heading in ("measured", "estimated before"):
        table.add_column(heading, justify="right")
    for name, value in _RATES.items():
        table.add_row(name, *(f"{value(one):.3g}" for one in (machine, guess)))
    return table


def _product(machine: Machine, rows: int) -> float:
    """Return operations a second of a product of ``rows`` rows and a square matrix."""
    return 2 * rows * WIDTH**2 / machine.multiply(rows, WIDTH, WIDTH**2)


WIDTH = 2048
_RATES: dict[str, Callable[[Machine], float]] = {
    "matrix products of one row, 10⁹ operations/s": lambda one: _product(one, 1) / 1e9,
    "matrix products of 256 rows, 10⁹ operations/s": lambda one: _product(one, 256) / 1e9,
    "attention of one query, 10⁹ operations/s": lambda one: one.attention[0][1] / 1e9,
    "memory, GB/s": lambda one: one.memory / 1e9,
    "files in the page cache, GB/s": lambda one: one.disk / 1e9,
    "files on disk, GB/s": lambda one: one.disk_cold / 1e9,
    "overhead of a layer, ms": lambda one: 1e3 * one.layer_s,
}
