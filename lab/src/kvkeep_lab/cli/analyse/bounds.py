"""``kvkeep analyse bounds``: how loose the bounds are by which selective recall chooses and certifies."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kvkeep.cli import options
from kvkeep_lab.cli.analyse import common


def bounds(
    file: common.File,
    model: options.Model = "smollm2",
    limit: common.Limit = 2048,
    pages: Annotated[str, typer.Option(help="Slots of a page, by commas.")] = "2,4,8,16,32,64",
    queries: Annotated[int, typer.Option(min=1, help="How many of the last tokens ask.")] = 64,
    share: Annotated[float, typer.Option(help="The share of attention that counts.")] = 0.01,
    output: common.Output = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """How far a page's bound is above its largest score, and how many pages it cannot rule out, by size of pages."""
    from kvkeep_lab.analyses.bounds import looseness
    from kvkeep_lab.analyses.figures import draw_bounds

    sizes = common.numbers(pages, int, "Pages", "8,16,32")
    loaded = common.load(model, output, dtype, device)
    ids = common.read_ids(loaded, file, limit)
    with common.progress("layers") as progress:
        found = looseness(loaded.model, ids, pages=sizes, queries=queries, share=share, progress=progress)
    if output is not None:
        draw_bounds(found, output, title=f"{loaded.name}, {found.tokens:,} tokens")
    table = common.new_table(
        "Bounds by page, means over layers, heads, queries and pages",
        "slots of\na page",
        "bound above the\nlargest true score",
        f"may have more\nthan {100 * share:g} %",
        "have\nmore",
    )
    for page in found.pages:
        excess, may, have = (found.mean(page, name) for name in ("excess", "may", "have"))
        table.add_row(f"{page}", common.number(excess, 1), common.percent(may, 1), common.percent(have, 1))
    common.tell(loaded, dtype, asdict(found), output, json, [table], [])
