"""``kvkeep analyse spectra``: how alike neighbours' queries, keys and values are, and the weights behind it."""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING

from rich.table import Table

from kvkeep.cli import options
from kvkeep_lab.cli.analyse import common

if TYPE_CHECKING:
    from kvkeep_lab.analyses.spectra import Spectra


def spectra(
    file: common.File,
    model: options.Model = "smollm2",
    limit: common.Limit = 512,
    output: common.Output = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """KVSlimmer's Fig. 2: cosine of neighbours, eigenvalues and modes of W_Q, W_K and W_V, by layer."""
    from kvkeep_lab.analyses.figures import draw_spectra
    from kvkeep_lab.analyses.spectra import spectra as run

    loaded = common.load(model, output, dtype, device)
    ids = common.read_ids(loaded, file, limit)
    with common.progress("layers") as progress:
        found = run(loaded.model, ids, progress=progress)
    if output is not None:
        draw_spectra(found, output, title=f"{loaded.name}, {found.tokens:,} tokens")
    common.tell(loaded, dtype, asdict(found), output, json, [_table(found)], _remarks(found))


def _table(found: Spectra) -> Table:
    from kvkeep_lab.analyses.spectra import PROJECTIONS

    table = common.new_table(
        "Q, K and V: cosine of neighbours, of tokens far apart, of neighbours as attended; modes with 90 % of energy",
        "layer",
        *(
            f"{measure}\n{name[0].upper()}"
            for measure in ("cos", "apart", "attended", "modes %")
            for name in PROJECTIONS
        ),
    )
    by_layer = {(row.layer, row.projection): row for row in found.rows}
    cells = [
        (f"{layer}", [by_layer.get((layer, name)) for name in PROJECTIONS])
        for layer in dict.fromkeys(row.layer for row in found.rows)
    ]
    for layer, rows in cells:
        table.add_row(
            layer,
            *(
                common.number(None if row is None else getattr(row, name))
                for name in ("cosine", "apart", "attended")
                for row in rows
            ),
            *(common.percent(None if row is None else row.modes) for row in rows),
        )
    every = [[row for row in found.rows if row.projection == name] for name in PROJECTIONS]
    table.add_row(
        "mean",
        *(
            common.number(fmean(getattr(row, name) for row in rows))
            for name in ("cosine", "apart", "attended")
            for rows in every
        ),
        *(common.percent(fmean(row.modes for row in rows)) for rows in every),
        style="bold",
    )
    return table


def _remarks(found: Spectra) -> list[str]:
    told = ", ".join(f"{name} {common.number(value)}" for name, value in found.correlation.items())
    return [
        f"Rank correlation over heads of the modes that hold 90 % of the energy with the cosine of neighbours: {told}."
        " If concentrated spectra made neighbours alike, it would be near -1."
    ]
