"""Have a chat that is longer than the model's context, and ask for the fact of its first turn: the picture of
docs/endless.md.

Every other turn gives the model a part of a book. 30,000 tokens take SmolLM2 several minutes a method.

python tools/endless_chat.py BOOK.txt [--tokens 30000] [--budget 2048] [-x METHOD ...] [--figure FILE.svg]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvkeep_lab.figures import COLOURS, FilePath, check_figure, dress, panels

from kvkeep import Conversation, KeepCache, load
from kvkeep.budget import size


class Fact(NamedTuple):
    """What a turn states."""

    text: str
    question: str
    answer: str
    """The word that the answer to the question must have."""


CODE = Fact("The secret code of the safe is 48213. Remember it.", "What is the secret code of the safe?", "48213")
CHARACTERS = 1600
"""Characters of the book in each turn."""
NEW = 8
"""The maximum number of tokens of an answer about the book."""


@dataclass(frozen=True)
class Turn:
    """What the last step of a turn attended to."""

    tokens: int
    """Tokens of the chat."""
    attended: list[tuple[int, int]]
    """Spans of tokens, first and one after the last."""


@dataclass
class Chat:
    """A chat with one method."""

    method: str
    fact: Fact
    turns: list[Turn] = field(default_factory=list)
    place: int = 0
    """The number of tokens before the fact."""
    answer: str = ""
    """The answer to the question for the fact."""
    seconds: float = 0.0

    @property
    def found(self) -> bool:
        """Whether the answer has the fact."""
        return self.fact.answer in self.answer


def parts(book: str) -> Iterator[str]:
    """Yield the book in parts of about :data:`CHARACTERS` characters, again and again."""
    words = itertools.cycle(book.split())
    while True:
        part = next(words)
        while len(part) < CHARACTERS:
            part += f" {next(words)}"
        yield part


def attended(cache: KeepCache) -> list[tuple[int, int]]:
    """Return the spans of tokens that a cache of ``endless`` attends to now."""
    length = cache.get_seq_length()
    choice = getattr(cache.stream.bounded[0].reader, "choice", None)
    if choice is None or choice.numbers is None or cache.exactness == "exact":
        return [(0, length)]
    passages = [(number * choice.size, (number + 1) * choice.size) for number in choice.numbers[0].tolist()]
    return [*passages, (choice.passages * choice.size, length)]


def chat(
    model: Any, tokenizer: Any, cache: KeepCache, book: str, tokens: int, fact: Fact = CODE, after: int = 0
) -> Chat:
    """Return a chat that states ``fact`` after ``after`` turns, speaks of ``book`` until it has ``tokens`` tokens, and
    asks for the fact."""
    talk, found, start = Conversation(model, tokenizer, cache), Chat(cache.method.name, fact), time.perf_counter()
    for number, part in enumerate(parts(book)):
        if number == after:
            found.place = talk.used
            talk.answer(fact.text, max_new_tokens=NEW)
        if talk.used >= tokens:
            break
        talk.answer(f"Here is a part of a novel: {part}\nWhat is it about?", max_new_tokens=NEW)
        found.turns.append(Turn(talk.used, attended(cache)))
    found.answer = talk.answer(fact.question, max_new_tokens=2 * NEW).text
    found.turns.append(Turn(talk.used, attended(cache)))
    found.seconds = time.perf_counter() - start
    return found


def draw(found: Chat, exact: int, path: FilePath) -> None:
    """Draw what each turn's last step attended to, and write the figure to ``path``."""
    title = f"What a step of '{found.method}' attends to, in a chat of {found.turns[-1].tokens:,} tokens"
    with panels(path, title) as [axes]:
        for turn in found.turns:
            last = turn is found.turns[-1]
            spans = [(low, max(high, low + 1)) for low, high in turn.attended]
            colour, width = (COLOURS[1], 2.5) if last else (COLOURS[0], 1.2)
            axes.vlines([turn.tokens] * len(spans), *zip(*spans, strict=True), color=colour, linewidth=width)
        axes.plot([], [], color=COLOURS[0], label="attended when a part of the book was discussed")
        axes.plot([], [], color=COLOURS[1], label=f"attended when '{found.fact.question}' was answered")
        axes.axvline(exact, color="0.5", linewidth=0.8, linestyle="--")
        axes.text(exact, found.turns[-1].tokens, " from here on not exact", va="top", fontsize=8, color="0.4")
        where, arrow = (found.turns[-1].tokens, found.place), {"arrowstyle": "->", "color": COLOURS[1]}
        axes.annotate(
            f"'{found.fact.text}'", where, (0.02, 0.6), textcoords="axes fraction", fontsize=8, arrowprops=arrow
        )
        axes.set_ylabel("token of the text")
        dress(axes, "", "tokens of the chat so far", y=0)
        axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def main() -> None:
    """Run a chat with each method, print a line for each, and draw the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", type=Path)
    parser.add_argument("--model", "-m", default="smollm2")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--budget", "-b", default="2048")
    parser.add_argument("--method", "-x", default=["endless", "streaming-llm"], nargs="+")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    if given.figure is not None:
        check_figure(given.figure)
    loaded, book = load(given.model), given.book.read_text("utf-8")
    for number, method in enumerate(given.method):
        cache = KeepCache(loaded.model, method, given.budget)
        found, memory = chat(loaded.model, loaded.tokenizer, cache, book, given.tokens), cache.memory()
        stored, result = sum(memory.checkpoint_bytes.values()), "found" if found.found else "not found"
        print(
            f"{method}: {found.turns[-1].tokens:,} tokens, {result}: {found.answer!r}; "
            f"{size(memory.resident_bytes)} resident, {size(memory.bookkeeping_bytes)} bookkeeping, {size(stored)} "
            f"stored, {found.seconds:.0f} s",
            flush=True,
        )
        if given.figure is not None and not number:
            draw(found, cache.exact_tokens or 0, given.figure)
        cache.reset()


if __name__ == "__main__":
    main()
