"""``kvkeep analyse rank``: the effective rank of W_q W_k^T, and what truncation to a rank does."""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvkeep.cli import options
from kvkeep.errors import UsageError
from kvkeep_lab.cli.analyse import common

if TYPE_CHECKING:
    from kvkeep_lab.analyses.rank import Ranks


def rank(
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Also truncate, and continue this (the chat template is used).")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", help="Also truncate, and continue this text as it is; - is standard input."),
    ] = None,
    model: options.Model = "smollm2",
    limit: common.Limit = 512,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens to write and to compare.")] = 32,
    ranks: Annotated[
        str | None,
        typer.Option(help="Ranks to truncate to, by commas. [default: the quarters of a head's width, and all of it]"),
    ] = None,
    output: common.Output = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """KV-Direct's Fig. 5 and 6: the effective rank of W_q W_k^T by head, and tokens and KL by rank."""
    from kvkeep.decode.prompt import encode, question
    from kvkeep_lab.analyses.figures import draw_rank
    from kvkeep_lab.analyses.rank import Ranks, default_ranks, truncations
    from kvkeep_lab.analyses.rank import ranks as run

    if prompt is not None and file is not None:
        raise UsageError("One text is continued: give --prompt or --file.")
    if ranks is not None and prompt is None and file is None:
        raise UsageError("To truncate to ranks there has to be a text to continue: give --prompt or --file.")
    wanted = None if ranks is None else common.numbers(ranks, int, "Ranks", "8,16,32")
    loaded = common.load(model, output, dtype, device)
    with common.progress("layers") as progress:
        found = Ranks(run(loaded.model, progress=progress))
    if prompt is not None or file is not None:
        if file is not None:
            ids = common.read_ids(loaded, file, limit)[0].tolist()
        else:
            ids = encode(loaded.tokenizer, question(None, prompt))
        with common.progress("truncated") as progress:
            rows = truncations(
                loaded.model,
                ids,
                wanted or default_ranks(found.layers[0].dim),
                new=max_tokens,
                progress=lambda text, done, total: progress(round(done), round(total or 0)),
            )
        found = replace(found, prompt_tokens=len(ids), new_tokens=max_tokens, truncations=tuple(rows))
    if output is not None:
        draw_rank(found, output, title=loaded.name)
    tables = [_layers(found)] + ([_truncated(found)] if found.truncations else [])
    common.tell(loaded, dtype, asdict(found), output, json, tables, _remarks(found))


def _layers(found: Ranks) -> Table:
    distances = list(found.layers[0].turned or {})
    table = common.new_table(
        "Effective rank at 90 % of the energy, mean (least to most) over heads",
        *("layer", "", "d_head", "query heads", "% of d_head", "KV heads\nstacked"),
        *(f"turned by\n{distance}" for distance in distances),
    )
    for layer in found.layers:
        table.add_row(
            f"{layer.layer}",
            layer.kind,
            f"{layer.dim}",
            f"{fmean(layer.heads):.1f} ({min(layer.heads):.0f}-{max(layer.heads):.0f})",
            common.percent(fmean(layer.heads) / layer.dim),
            f"{fmean(layer.groups):.1f}",
            *(f"{(layer.turned or {})[distance]:.1f}" for distance in distances),
        )
    dim = fmean(layer.dim for layer in found.layers)
    means = [fmean((layer.turned or {})[distance] for layer in found.layers) for distance in distances]
    table.add_row(
        *("mean", "", f"{dim:g}", f"{found.mean():.1f}", common.percent(found.mean() / dim)),
        *(f"{found.mean('groups'):.1f}", *(f"{mean:.1f}" for mean in means)),
        style="bold",
    )
    return table


def _truncated(found: Ranks) -> Table:
    from kvkeep_lab.analyses.rank import EVERY, LEFT, PAPER

    ways = [*EVERY, LEFT]
    table = common.new_table(
        f"Truncated to a rank: {found.prompt_tokens:,} tokens read, {found.new_tokens} written",
        *("rank", "energy %"),
        *(heading for way in ways for heading in (f"{way}:\nmatch %", "\nKL")),
        *("the paper's:\nmatch %", "\nKL"),
    )
    by_rank = {(row.way, row.rank): row for row in found.truncations}
    dim = found.layers[0].dim
    for each in dict.fromkeys(row.rank for row in found.truncations):
        rows = [by_rank[way, each] for way in ways]
        cells = [cell for row in rows for cell in (common.percent(row.match), _nats(row.kl))]
        table.add_row(f"{each}", common.percent(found.energy(each), 1), *cells, *PAPER.get(each / dim, ("", "")))
    return table


def _nats(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.2g}"


def _remarks(found: Ranks) -> list[str]:
    heads = [value for layer in found.layers for value in layer.heads]
    fourth = [value for layer in found.layers for value in layer.fourth]
    low = sum(value <= 10 for value in heads)
    half = found.layers[0].dim // 2
    remarks = [
        f"{low} of {len(heads)} query heads have an effective rank of 10 or less; the least is {min(heads):.0f}. "
        f"Rank {half} holds {common.percent(found.energy(half), 1)} % of the energy.",
        f"Of fourth powers of the singular values: mean rank {found.mean('fourth'):.1f}, the least {min(fourth):.0f}; "
        f"rank {half} holds {common.percent(found.energy(half, 'fourth_energy'), 1)} %.",
        "The paper's means: 21.2 of 64 (SmolLM2-135M), 20.0 of 64 (Qwen2.5-0.5B), 70.2 of 256 (Gemma 3 4B); "
        "rank 32 of 64 holds more than 95 %.",
    ]
    if found.truncations:
        remarks.append("'lowrank' leaves the newest 32 entries or so as they are; the others truncate every entry.")
    return remarks + sorted({row.error for row in found.truncations if row.error})
