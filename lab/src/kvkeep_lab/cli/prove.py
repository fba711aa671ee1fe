"""``kvkeep prove``: the unbounded cache's answers from other caches, token by token, and how long they take."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import err, machine, note, print_json, show
from kvkeep.errors import Interrupted, KvkeepError, UsageError
from kvkeep_lab.cli.compare import specs

if TYPE_CHECKING:
    from kvkeep_lab.prove import Row


def prove(
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="The text to ask about; - is standard input.")
    ] = None,
    model: options.Model = "smollm2",
    method: Annotated[list[str] | None, typer.Option("--method", "-x", help="Methods, as for compare.")] = None,
    budget: Annotated[list[str] | None, typer.Option("--budget", "-b", help="Budgets, as for compare.")] = None,
    checkpoint: Annotated[str, typer.Option("--checkpoint", "-c", help="Kinds, separated by commas.")] = "kv",
    where: Annotated[str, typer.Option("--where", "-w", help="Places, separated by commas.")] = "disk",
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="How many prompts are made of the text.")] = 8,
    lengths: Annotated[str, typer.Option(help="Their tokens, separated by commas.")] = "600",
    kinds: Annotated[
        str, typer.Option(help="Their kinds: summary, question, continuation, chat.")
    ] = "summary,question,continuation,chat",
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Tokens of an answer.")] = 128,
    every: Annotated[
        bool, typer.Option("--every/--in-turn", help="Every cache for every prompt, or one for each in turn.")
    ] = True,
    copies: Annotated[int | None, typer.Option(min=0, help="0 keeps rounds from copying drafts from the text.")] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="A file that keeps each answer as it comes; run again, and it goes on."),
    ] = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Answer prompts made of a text with the unbounded cache and with others; compare tokens and times."""
    from kvkeep.cache import check_request
    from kvkeep.decode.prompt import read_text
    from kvkeep.models.loading import load
    from kvkeep_lab import prove as lab
    from kvkeep_lab.prompts import KINDS
    from kvkeep_lab.prompts import prompts as make

    methods, budgets = specs(method or ["snapkv+verified"]), (",".join(budget or ["12.5%"])).split(",")
    for name in methods:
        check_request(name, None, None, None)
    for amount in budgets:
        check_request(None, amount, None, None)
    for kind in checkpoint.split(","):
        for place in where.split(","):
            check_request(None, "1", kind, place)
    if unknown := [kind for kind in kinds.split(",") if kind not in KINDS]:
        raise UsageError(f"A prompt of kind '{unknown[0]}' is not known; there are {', '.join(KINDS)}.")
    if not all(part.isdigit() and int(part) >= 32 for part in lengths.split(",")):
        raise UsageError(f"Lengths are numbers of tokens from 32 on, separated by commas, not '{lengths}'.")
    listed = lab.cases(methods, budgets, checkpoint.split(","), where.split(","), copies)
    text = read_text(file) if file else _built_in()
    loaded = load(model, dtype=dtype, device=device, progress=note)
    asked = make(loaded.tokenizer, text, [int(part) for part in lengths.split(",")], prompts, kinds.split(","))
    setting = machine(loaded, dtype)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)
        answers, refused = lab.prove(
            loaded.model,
            loaded.tokenizer,
            asked,
            listed,
            new=max_tokens,
            every=every,
            setting=dumps(setting),
            store=store,
            progress=lambda label, done, total: bar.update(task, description=label, completed=done, total=total),
        )
    if not answers:
        raise KvkeepError(next(iter(refused.values()), "Interrupted before the first answer."))
    rows = lab.rows(answers, refused)
    if json:
        print_json(
            {"machine": setting, "rows": [asdict(row) for row in rows], "answers": [asdict(one) for one in answers]}
        )
    else:
        note(" ".join(f"{name}={value}" for name, value in setting.items()))
        _table(rows)
        for one in answers:
            if one.differs_at is not None:
                note(
                    f"{one.label}, {one.kind} of {one.prompt_tokens}: differs at token {one.differs_at}, gap "
                    f"{one.gap:.3g}, noise {one.noise:.3g}: {'a tie' if one.tie else 'no tie'}"
                )
    if len(answers) + len(refused) < (len(asked) * len(listed) if every else len(asked)) and not refused:
        raise Interrupted("Interrupted; the figures above are of what was answered until then.")


def _built_in() -> str:
    from kvkeep_lab.verify import TEXT

    return "\n\n".join([TEXT] * 3)


def _table(rows: list[Row]) -> None:
    table = Table(header_style="bold")
    for heading in ("", "prompts", "identical", "ties", "tokens", "prefill", "decoding", "a round", "right", "budget"):
        table.add_column(heading, justify="left" if not heading else "right", overflow="fold")
    for row in rows:
        if row.error:
            table.add_row(row.label, row.error)
            continue
        table.add_row(
            row.label,
            str(row.prompts),
            str(row.identical),
            str(row.ties),
            f"{row.same}/{row.tokens}",
            f"{row.prefill_ratio:.2f} x",
            f"{row.decode_ratio:.2f} x",
            "" if row.tokens_a_round is None else f"{row.tokens_a_round:.1f}",
            "" if row.right is None else f"{row.right:.0%}",
            "" if row.within_budget is None else "held" if row.within_budget else "exceeded",
        )
    show(table)
    note("Times are relative to transformers' own cache in the same run: below 1 is faster.")
