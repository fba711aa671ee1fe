"""``kvkeep demo``: a question about a long text, answered by the full cache and by four methods within a budget."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvkeep.budget import size
from kvkeep.cli import options
from kvkeep.cli.cache_options import AUTO, CacheOptions
from kvkeep.cli.generate import as_json
from kvkeep.cli.output import note, out, print_json, printable, reading
from kvkeep.cli.startup import startup
from kvkeep.errors import UsageError
from kvkeep.native.library import library

if TYPE_CHECKING:
    from kvkeep.decode.generate import Generation

FULL, EXACT = "full", "kv-direct"
LOSSY: tuple[str, ...] = ("window", "streaming-llm", "h2o")
FEWER = "use fewer tokens of the text (--tokens)"
LICENCE = Path(__file__).with_name("demo.txt")  # the licence of this project
PASSWORD = "blue elephant"
PLANTED = f'The secret password of the library is "{PASSWORD}".'
QUESTION, SUMMARISE = "What is the secret password of the library?", "Summarise this text in one sentence."
PLACE = 0.15
"""The planted sentence is a separate paragraph, at the first break after this share of the text's characters."""
MAX_TEXT_TOKENS = 3200
"""Default maximum of the text's tokens. Longer texts are cut, so that the demo ends within two minutes."""
LARGER = "qwen2.5-coder-1.5b"
"""The model to try if the full cache's answer is wrong, too."""
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
    max_tokens: options.MaxTokens = 32,
    json: options.Json = False,
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
    requests = {method: CacheOptions(method, budget) for method in LOSSY}
    requests = {
        FULL: CacheOptions(FULL),
        EXACT: CacheOptions(EXACT, budget, where="disk"),
    } | requests
    requests[EXACT].check()
    options.check_model(model)
    planted = doc is None
    text = read_text(doc) if doc is not None else plant(LICENCE.read_text("utf-8"))
    if planted and question is None and expect is None:
        expect = PASSWORD
    expect = expect or None
    question = question or (QUESTION if planted else SUMMARISE)
    with startup(model):
        from kvkeep.decode.generate import generate, positions_of, room_after
        from kvkeep.models.loading import load

        loaded = load(model, progress=note)
    text, count = shortened(loaded.tokenizer, text, tokens)
    if count > tokens:
        note(f"The demo uses the first {tokens:,} of {count:,} tokens; --tokens {count} uses the whole text.")
    ids = encode(loaded.tokenizer, ask(text, question))

    def cache_of(method: str) -> Any:
        return requests[method].parse().build(loaded.model, len(ids) + max_tokens, max_tokens)

    with cache_of(FULL) as cache:  # also for streaming-llm, which continues beyond the model's positions
        max_tokens = min(max_tokens, room_after(len(ids), positions_of(loaded.model, cache), FEWER))
    cache_of(EXACT).reset()  # raises for a budget that is too small, before anything is printed
    if not json:
        place = text.index(PLANTED) / len(text) if planted else None
        _print_head(len(ids), place, question, f"{model}, budget {budget}, greedy")

    answers: list[MethodAnswer] = []
    for method in requests:
        try:
            cache = cache_of(method)
            with reading(len(ids), f"{method} reads", silent=json) as advance:
                made = generate(
                    loaded.model, loaded.tokenizer, ids, cache, max_new_tokens=max_tokens, on_progress=advance
                )
            answers.append(MethodAnswer(method, made))
        except UsageError as error:
            if method not in LOSSY:
                raise
            answers.append(MethodAnswer(method, refused=str(error)))
        if not json:
            _print_row(answers[-1], answers[-1].right(expect, answers[0]))
    full, exact = answers[0].made, answers[1].made
    assert full is not None and exact is not None
    same = sum(a == b for a, b in zip(full.tokens, exact.tokens, strict=False))
    if json:
        print_json(
            {
                **{"question": question, "planted": PLANTED if planted else None, "expect": expect},
                **{"prompt_tokens": len(ids), "budget": budget, "identical": same, "tokens": len(full.tokens)},
                "answers": [one.as_json(expect, answers[0]) for one in answers],
            }
        )
    else:
        _print_foot(full, exact, same, expect)
        if not answers[0].right(expect, answers[0]) and model != LARGER:
            note(f"Even with every entry, {model} does not answer right; try a larger model: --model {LARGER}.")
    if full.tokens != exact.tokens:
        note(f"{EXACT} generated other tokens than {FULL}. {_cause()}")
        raise typer.Exit(1)


def _cause() -> str:
    """Return the reason why the tokens of an exact method can differ."""
    if library() is None:
        return "Without the native library, rounding can decide between two equally likely tokens."
    return "With the native library this is a bug: please report text, question and 'kvkeep prove --receipt'."


def plant(text: str) -> str:
    """Return ``text`` with the planted sentence as a separate paragraph."""
    at = text.index("\n\n", int(PLACE * len(text))) + 2
    return f"{text[:at]}{PLANTED}\n\n{text[at:]}"


@dataclass(frozen=True)
class MethodAnswer:
    """The answer of one method."""

    method: str
    made: Generation | None = None
    """The answer; None if the method refused the budget."""
    refused: str = ""
    """Reason why the method refused the budget."""

    def right(self, expect: str | None, full: MethodAnswer) -> bool:
        """Return whether the answer contains ``expect``; if that is None, whether its tokens equal ``full``'s."""
        if self.made is None or full.made is None:
            return False
        return self.made.tokens == full.made.tokens if expect is None else expect.lower() in self.made.text.lower()

    def as_json(self, expect: str | None, full: MethodAnswer) -> dict[str, Any]:
        """Return the answer as plain types for ``--json``."""
        if self.made is None:
            return {"method": self.method, "right": False, "refused": self.refused}
        return {**as_json(self.made), "right": self.right(expect, full)}


def _print_head(count: int, place: float | None, question: str, conditions: str) -> None:
    text = f"{count:,} tokens" + (f"; planted {place:.0%} into it: {PLANTED}" if place is not None else "")
    _print_pairs([("Text", text), ("Question", question), ("Model", conditions)])
    out.print()
    out.print(Text(_line("", *COLUMNS), "bold"))


def _print_pairs(rows: Iterable[tuple[str, str]], style: str = "") -> None:
    """Print values beside their names."""
    table = Table.grid(padding=(0, 2))
    for name, words in rows:
        table.add_row(Text(name, "dim"), Text(printable(words), style))
    out.print(table)


COLUMNS = ("memory", "on disk", "tokens/s")


def _line(name: str, memory: str, disk: str, speed: str) -> str:
    """Return a line of the table."""
    return f"{name:17}{memory:>10}{disk:>10}{speed:>10}"


def _print_row(answer: MethodAnswer, right: bool) -> None:
    """Print a method's line, and its answer below it."""
    made, numbers, words = answer.made, ["-"] * 3, answer.refused
    if made is not None:
        disk = sum(made.memory.checkpoint_bytes.values())
        numbers = [size(made.memory.resident_bytes), size(disk) if disk else "-"]
        numbers += [f"{made.timing.decode_tokens_per_s:.1f}"]
        words = " ".join(made.text.split()) + (" ..." if made.stopped == "length" else "")
    name = f"{_sign(right)} {answer.method}"
    line = Text(_line(name, *numbers))
    line.stylize("bold green" if right else "bold red", 0, len(name))
    out.print(line)
    out.print(Padding(Text(printable(words), "" if right else "dim"), (0, 0, 0, 2)))


def _print_foot(full: Generation, exact: Generation, same: int, expect: str | None) -> None:
    right = f'says "{printable(expect)}", {_sign(False)} does not' if expect else f"the tokens of {FULL}"
    share = exact.memory.resident_bytes / full.memory.resident_bytes if full.memory.resident_bytes else 1.0
    out.print()
    out.print(Text(f"{_sign(True)} {right}."))
    tokens = f"{same} of the {len(full.tokens)} tokens of {FULL}"
    out.print(Text(f"{EXACT} generated {tokens} with {share:.0%} of its cache in memory."))
    out.print()
    _print_pairs(NEXT, "bold")


def _sign(right: bool) -> str:
    unicode = out.encoding.lower().startswith("utf")
    return ("✓" if right else "✗") if unicode else ("+" if right else "x")
