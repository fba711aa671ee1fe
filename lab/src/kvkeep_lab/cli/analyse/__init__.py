"""``kvkeep analyse ANALYSIS``: what the papers look at inside a model, on your own. One file for each analysis."""

from __future__ import annotations

import typer

from kvkeep_lab.cli.analyse.alignment import alignment
from kvkeep_lab.cli.analyse.bounds import bounds
from kvkeep_lab.cli.analyse.rank import rank
from kvkeep_lab.cli.analyse.reactivation import reactivation
from kvkeep_lab.cli.analyse.spectra import spectra

analyse = typer.Typer(help="Look inside a model as the papers do: data, table and figure.", no_args_is_help=True)
for command in (spectra, alignment, reactivation, rank, bounds):
    analyse.command()(command)
