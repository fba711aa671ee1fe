"""``kvkeep demo``: a budget against the full cache, token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

import kvkeep
from kvkeep.cli import options
from kvkeep.cli.asked import asked
from kvkeep.cli.generate import as_json
from kvkeep.cli.output import note, out, print_json, reading, size, write
from kvkeep.errors import UsageError

if TYPE_CHECKING:
    from kvkeep.decode.generate import Generation

METHOD = "snapkv+verified"
LONGEST = 3200  # prompt tokens of the text that the demonstration reads


def demo(
    doc: Annotated[str | None, typer.Option(help="The text.", show_default="this project's own docs")] = None,
    question: Annotated[str, typer.Option(help="The question about it.")] = "Summarise this text in one sentence.",
    model: options.Model = "smollm2",
    budget: options.Budget = "12.5%",
    checkpoint: options.Checkpoint = None,
    where: options.Where = None,
    max_tokens: options.MaxTokens = 64,
    json: options.Json = False,
) -> None:
    """Answer a question about a long text with the full cache and within a budget; compare token by token."""
    from kvkeep.decode.generate import generate
    from kvkeep.decode.prompt import encode, read_text, shortened
    from kvkeep.decode.prompt import question as ask
    from kvkeep.models.loading import load

    wanted = {"stock": asked("stock", None), METHOD: asked(METHOD, budget, checkpoint=checkpoint, where=where)}
    text = read_text(doc) if doc else _own_docs()
    loaded = load(model, progress=note)
    text, count = shortened(loaded.tokenizer, text, LONGEST)
    used = min(count, LONGEST)
    ids = encode(loaded.tokenizer, ask(text, question))
    note(f"{used} tokens of text. {question}")
    results = {}
    for method, own in wanted.items():
        cache = own.cache(loaded.model, len(ids) + max_tokens, max_tokens)
        note(f"\nWith {'the full cache' if method == 'stock' else f'{METHOD} at {budget}'}:")
        with reading(len(ids)) as advance:
            results[method] = generate(
                loaded.model,
                loaded.tokenizer,
                ids,
                cache,
                max_new_tokens=max_tokens,
                on_progress=advance,
                on_text=None if json else write,
            )
        if not json:
            write("\n")
    full, kept = results["stock"], results[METHOD]
    same = sum(a == b for a, b in zip(full.tokens, kept.tokens, strict=False))
    if json:
        print_json(
            {"identical": same, "tokens": len(full.tokens), **{name: as_json(one) for name, one in results.items()}}
        )
    else:
        _table(results, same)
    if same != max(len(full.tokens), len(kept.tokens)):
        note("The answers differ: this should not happen in float32; please report it with this text.")
        raise typer.Exit(1)


def _own_docs() -> str:
    root = Path(kvkeep.__file__).parents[2]
    files = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in files if path.is_file())
    if not text:
        raise UsageError("The project's docs are not installed here; name a text with --doc.")
    return text


def _table(results: dict[str, Generation], same: int) -> None:
    table = Table(header_style="bold")
    for heading in ("", "full cache (stock)", METHOD):
        table.add_column(heading, justify="left" if not heading else "right")
    full, kept = results["stock"], results[METHOD]

    def row(name: str, read: Callable[[Generation], str]) -> None:
        table.add_row(name, read(full), read(kept))

    table.add_row("tokens identical", "", f"{same}/{len(full.tokens)}")
    row("cache resident", lambda one: size(one.memory.resident_bytes))
    row(
        "checkpoints",
        lambda one: (
            ", ".join(f"{size(count)} on {place}" for place, count in one.memory.checkpoint_bytes.items() if count)
            or "none"
        ),
    )
    row("cache at its peak", lambda one: size(one.memory.peak_cache_bytes))
    row("workspace at its peak", lambda one: size(one.memory.peak_workspace_bytes))
    row("prefill, tokens/s", lambda one: f"{one.timing.prefill_tokens_per_s:.0f}")
    row("decode, tokens/s", lambda one: f"{one.timing.decode_tokens_per_s:.1f}")
    out.print(table)
