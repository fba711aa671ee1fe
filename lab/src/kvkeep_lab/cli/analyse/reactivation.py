"""``kvkeep analyse reactivation``: how often what was no heavy hitter is needed later."""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvkeep.cli import options
from kvkeep_lab.cli.analyse import common

if TYPE_CHECKING:
    from kvkeep_lab.analyses.reactivation import Reactivation


def reactivation(
    file: common.File,
    model: options.Model = "smollm2",
    limit: common.Limit = 1024,
    threshold: Annotated[
        float, typer.Option(help="A token is active for a query that pays it more of its attention than this share.")
    ] = 0.005,
    ratios: Annotated[
        str, typer.Option(help="Shares of the prompt that are heavy hitters, by commas.")
    ] = "0.1,0.2,0.4",
    output: common.Output = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """KVReviver's Fig. 2: how often tokens that are not heavy hitters become active later, by layer and distance."""
    from kvkeep_lab.analyses.figures import draw_reactivation
    from kvkeep_lab.analyses.reactivation import reactivation as run

    shares = common.numbers(ratios, float, "Ratios", "0.1,0.2,0.4")
    loaded = common.load(model, output, dtype, device)
    ids = common.read_ids(loaded, file, limit)
    with common.progress("layers") as progress:
        found = run(loaded.model, ids, threshold=threshold, ratios=shares, progress=progress)
    if output is not None:
        draw_reactivation(
            found, output, title=f"{loaded.name}, {found.tokens:,} tokens: heavy hitters of the first {found.prompt:,}"
        )
    tables = [_summary(found), _by_layer(found), _by_distance(found)]
    common.tell(loaded, dtype, asdict(found), output, json, tables, _remarks(found))


def _rules(found: Reactivation) -> list[tuple[str, float]]:
    return list(dict.fromkeys((row.rule, row.ratio) for row in found.rows))


def _summary(found: Reactivation) -> Table:
    table = common.new_table(
        "Tokens that are not heavy hitters, means over layers and KV heads",
        *("heavy hitters by", "ratio", "become\nactive %", "queries each\nis active for", "of all\nactivations %"),
        "of the attention\nto the prompt %",
    )
    for rule, ratio in _rules(found):
        table.add_row(
            rule,
            f"{ratio:g}",
            *(common.percent(found.mean(rule, ratio, "reactivated"), 1),),
            common.number(found.mean(rule, ratio, "activations")),
            *(common.percent(found.mean(rule, ratio, name), 1) for name in ("missed", "mass")),
        )
    return table


def _by_layer(found: Reactivation) -> Table:
    rules = _rules(found)
    table = common.new_table(
        "Become active, % of those that are not heavy hitters, by layer",
        "layer",
        *(f"{rule}\n{ratio:g}" for rule, ratio in rules),
        "active tokens\na query",
    )
    by_layer = {(row.layer, row.rule, row.ratio): row for row in found.rows}
    for layer, active in found.active.items():
        cells = (common.percent(by_layer[layer, *rule].reactivated) for rule in rules)
        table.add_row(f"{layer}", *cells, common.number(active, 1))
    return table


def _by_distance(found: Reactivation) -> Table:
    rules = _rules(found)
    table = common.new_table(
        "Active, % of pairs of a query and a token that is no heavy hitter, by distance",
        "tokens back",
        *(f"{rule}\n{ratio:g}" for rule, ratio in rules),
    )
    columns = [found.at_distance(*rule) for rule in rules]
    for (low, high), *cells in zip(found.distances, *columns, strict=True):
        table.add_row(f"{low:,}-{high:,}", *(common.percent(cell, 2) for cell in cells))
    return table


def _remarks(found: Reactivation) -> list[str]:
    return [
        f"Active: more than {100 * found.threshold:g} % of a query's attention, {found.threshold * found.prompt:.1f} "
        f"times an even share of the prompt. A query makes {fmean(found.active.values()):.1f} of the prompt's "
        f"{found.prompt:,} tokens active."
    ]
