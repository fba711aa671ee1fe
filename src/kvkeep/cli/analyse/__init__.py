"""``kvkeep analyse ANALYSIS``: what the papers look at inside a model, on your own. One file for each analysis."""

from __future__ import annotations

import typer

from kvkeep.cli.analyse.alignment import alignment
from kvkeep.cli.analyse.bounds import bounds
from kvkeep.cli.analyse.rank import rank
from kvkeep.cli.analyse.reactivation import reactivation
from kvkeep.cli.analyse.spectra import spectra

analyse = typer.Typer(help="Look inside a model as the papers do: data, table and figure.", no_args_is_help=True)
for command in (spectra, alignment, reactivation, rank, bounds):
    analyse.command()(command)
