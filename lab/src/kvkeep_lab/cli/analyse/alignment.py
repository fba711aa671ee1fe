"""``kvkeep analyse alignment``: does the gradient that KVSlimmer leaves out stand as it says?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvkeep.cli import options
from kvkeep_lab.cli.analyse import common

if TYPE_CHECKING:
    from kvkeep_lab.analyses.alignment import Alignment

_SHARES = ("agree", "agree_alike", "convex", "convex_closed")


def alignment(
    file: common.File,
    model: options.Model = "smollm2",
    limit: common.Limit = 512,
    queries: Annotated[int, typer.Option(min=1, help="Queries, spread over the second half; all pairs of each.")] = 64,
    output: common.Output = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """KVSlimmer's Fig. 3: cosines of E = dL/do, by backpropagation, with c11, c12 and c22, by head."""
    from kvkeep_lab.analyses.alignment import alignment as run
    from kvkeep_lab.analyses.figures import draw_alignment

    loaded = common.load(model, output, dtype, device)
    ids = common.read_ids(loaded, file, limit)
    with common.progress("layers, after one pass forward and back") as progress:
        found = run(loaded.model, ids, queries=queries, progress=progress)
    if output is not None:
        draw_alignment(
            found, output, title=f"{loaded.name}, {found.tokens:,} tokens, {len(found.queries)} queries, all pairs"
        )
    common.tell(loaded, dtype, asdict(found), output, json, [_table(found)], _remarks(found))


def _table(found: Alignment) -> Table:
    from kvkeep_lab.analyses.alignment import MEASURES

    table = common.new_table(
        "Means over the heads of each layer",
        *(
            "layer",
            "cos\nc11",
            "cos\nc12",
            "cos\nc22",
            "over pairs:\n11~22",
            "\n11~-12",
            "signs\n%",
            "of alike\nkeys %",
        ),
        *("weight in [0,1]\nEq. 30 %", "\nEq. 33 %", "|difference|\nof the two", "\nof 30 and 1/2"),
    )
    layers: list[int | None] = [*dict.fromkeys(row.layer for row in found.rows), None]
    for layer in layers:
        cells = [
            common.percent(value) if name in _SHARES else common.number(value, 3)
            for name, value in ((name, found.mean(name, layer)) for name in MEASURES)
        ]
        table.add_row("mean" if layer is None else f"{layer}", *cells, style="bold" if layer is None else "")
    return table


def _remarks(found: Alignment) -> list[str]:
    return [
        "Eq. 32 says cos(E, c11) = cos(E, c22) = -cos(E, c12). Rank correlation over heads of the means: c11 with c22 "
        f"{common.number(found.spread['cos22'])}, with -c12 {common.number(found.spread['-cos12'])}; but these are "
        "means over the same tokens, one apart.",
        "Over pairs Eq. 32 is 1, 1 and 100 %; two independent residuals of one length are 0, 0.71 and 50 %.",
        f"The loss is {found.loss:.2f} nats a token.",
    ]
