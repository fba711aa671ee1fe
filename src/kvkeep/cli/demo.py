"""``kvkeep demo``: a question about a long text, answered by the full cache and by four methods within a budget."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvkeep.budget import size
from kvkeep.cli import options
from kvkeep.cli.cache_options import AUTO, CacheOptions
from kvkeep.cli.output import note, out, printable, reading
from kvkeep.cli.startup import startup
from kvkeep.errors import UsageError
from kvkeep.native.library import library

if TYPE_CHECKING:
    from kvkeep.decode.generate import Generation

FULL, EXACT = "full", "kv-direct"
LOSSY: tuple[str, ...] = ("window", "streaming-llm", "h2o")
LICENCE = Path(__file__).with_name("demo.txt")  # the licence of this project
PASSWORD = "blue elephant"
PLANTED = f'The secret password of the library is "{PASSWORD}".'
QUESTION, SUMMARISE = "What is the secret password of the library?", "Summarise this text in one sentence."
PLACE = 0.15
"""The planted sentence is a separate paragraph, at the first break after this share of the text's characters."""
MAX_TEXT_TOKENS = 3200
"""Default maximum of the text's tokens. Longer texts are cut, so that the demo ends within two minutes."""
ANSWER_TOKENS = 32
LARGER = "qwen2.5-coder-1.5b"
"""The model to try if even the full cache's answer is wrong."""
NEXT: tuple[tuple[str, str], ...] = (
    ("your own text", "kvkeep demo --doc FILE --question TEXT"),
    ("a bounded chat", "kvkeep chat --budget 512"),
    ("a server", "kvkeep serve --memory 512MB"),
    ("all methods", "kvkeep methods"),
)


def demo(
    doc: Annotated[
        str | None, typer.Option(help="Text to ask about; - is standard input.", show_default="this project's licence")
    ] = None,
    question: Annotated[
        str | None, typer.Option(help="Question about the text.", show_default="the password planted in the licence")
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(help="Words that a right answer contains.", show_default="the same tokens as the full cache"),
    ] = None,
    model: options.Model = "smollm2",
    budget: Annotated[
        str,
        typer.Option("--budget", "-b", help="Cache budget: entries per layer (512), bytes (64MB), or a share (25%)."),
    ] = "12.5%",
    tokens: Annotated[
        int, typer.Option(min=1, help="Maximum tokens of the text; a longer one is cut.")
    ] = MAX_TEXT_TOKENS,
) -> None:
    """Answer a question about a long text with the full cache, and with four methods within a budget.

    Without --doc, a sentence is planted in the text and the question asks for it: the answers show which methods
    lost it.
    """
    # OpenMP reads the variable when torch is imported. Spinning threads slow down a busy machine a lot.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from kvkeep.decode.prompt import encode, shortened
    from kvkeep.decode.prompt import question as ask
    from kvkeep.decode.texts import read_text

    if budget == AUTO:
        raise UsageError("The demo needs a budget in entries, bytes or percent; 'kvkeep plan' shows their bytes.")
    requests = {FULL: CacheOptions(FULL), EXACT: CacheOptions(EXACT, budget, where="disk")}
    requests |= {method: CacheOptions(method, budget) for method in LOSSY}
    requests[EXACT].check()
    options.check_model(model)
    text = plant(LICENCE.read_text("utf-8")) if doc is None else read_text(doc)
    if doc is None and question is None:
        expect = expect or PASSWORD
    question = question or (QUESTION if doc is None else SUMMARISE)
    with startup(model):
        from kvkeep.decode.generate import generate, positions_of, room_after
        from kvkeep.models.loading import load

        loaded = load(model, progress=note)
    text, count = shortened(loaded.tokenizer, text, tokens)
    if count > tokens:
        note(f"The demo uses the first {tokens:,} of {count:,} tokens; --tokens {count} uses the whole text.")
    ids = encode(loaded.tokenizer, ask(text, question))
    caches = {
        method: request.parse().build(loaded.model, len(ids) + ANSWER_TOKENS, ANSWER_TOKENS)
        for method, request in requests.items()
    }
    # the limit holds also for streaming-llm, which continues beyond the model's positions
    positions = positions_of(loaded.model, caches[FULL])
    limit = min(ANSWER_TOKENS, room_after(len(ids), positions, "use fewer tokens of the text (--tokens)"))
    about = [("Text", f"{len(ids):,} tokens"), ("Question", question), ("Model", f"{model}, budget {budget}, greedy")]
    if doc is None:
        about[0] = ("Text", f"{len(ids):,} tokens; planted {text.index(PLANTED) / len(text):.0%} into it: {PLANTED}")
    _print_pairs(about)
    out.print()
    out.print(Text(_line("", "memory", "on disk", "tokens/s"), "bold"))
    answers: dict[str, Generation] = {}
    right: dict[str, bool] = {}
    for method, cache in caches.items():
        with cache, reading(len(ids), f"{method} reads") as advance:
            made = generate(loaded.model, loaded.tokenizer, ids, cache, max_new_tokens=limit, on_progress=advance)
        answers[method] = made
        same = made.tokens == answers[FULL].tokens
        right[method] = same if expect is None else expect.lower() in made.text.lower()
        _print_answer(method, made, right[method])
    full, exact = answers[FULL], answers[EXACT]
    _print_foot(full, exact, expect)
    if not right[FULL] and model != LARGER:
        note(f"Even with every entry, {model} gives a wrong answer; try a larger model: --model {LARGER}.")
    if full.tokens != exact.tokens:
        cause = "With the native library this is a bug: please report text, question and 'kvkeep prove --receipt'."
        if library() is None:
            cause = "Without the native library, rounding can decide between two equally likely tokens."
        note(f"{EXACT} and {FULL} generated different tokens. {cause}")
        raise typer.Exit(1)


def plant(text: str) -> str:
    """Return ``text`` with the planted sentence as a separate paragraph."""
    at = text.index("\n\n", int(PLACE * len(text))) + 2
    return f"{text[:at]}{PLANTED}\n\n{text[at:]}"


def _print_pairs(rows: Iterable[tuple[str, str]], style: str = "") -> None:
    """Print values beside their names."""
    table = Table.grid(padding=(0, 2))
    for name, words in rows:
        table.add_row(Text(name, "dim"), Text(printable(words), style))
    out.print(table)


def _line(name: str, memory: str, disk: str, speed: str) -> str:
    """Return a line of the table."""
    return f"{name:17}{memory:>10}{disk:>10}{speed:>10}"


def _print_answer(method: str, made: Generation, right: bool) -> None:
    """Print a method's line, and its answer below it."""
    name, disk = f"{_sign(right)} {method}", sum(made.memory.checkpoint_bytes.values())
    speed = f"{made.timing.decode_tokens_per_s:.1f}"
    line = Text(_line(name, size(made.memory.resident_bytes), size(disk) if disk else "-", speed))
    line.stylize("bold green" if right else "bold red", 0, len(name))
    out.print(line)
    words = " ".join(made.text.split()) + (" ..." if made.stopped == "length" else "")
    out.print(Padding(Text(printable(words), "" if right else "dim"), (0, 0, 0, 2)))


def _print_foot(full: Generation, exact: Generation, expect: str | None) -> None:
    right = f'says "{printable(expect)}", {_sign(False)} does not' if expect else f"the tokens of {FULL}"
    share = exact.memory.resident_bytes / full.memory.resident_bytes if full.memory.resident_bytes else 1.0
    same = sum(a == b for a, b in zip(full.tokens, exact.tokens, strict=False))
    tokens = f"{same} of the {len(full.tokens)} tokens of {FULL}"
    out.print()
    out.print(Text(f"{_sign(True)} {right}."))
    out.print(Text(f"{EXACT} generated {tokens} with {share:.0%} of its cache in memory."))
    out.print()
    _print_pairs(NEXT, "bold")


def _sign(right: bool) -> str:
    unicode = out.encoding.lower().startswith("utf")
    return ("✓" if right else "✗") if unicode else ("+" if right else "x")
