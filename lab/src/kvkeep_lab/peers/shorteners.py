"""Prompts that fit: a long text is shortened, and the full cache reads what is left. These are the rivals of a bounded
cache that need nothing of the model but its positions."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from kvkeep.cache import KeepCache
from kvkeep.decode.excerpts import CHUNK_TOKENS, Excerpts
from kvkeep.decode.generate import generate
from kvkeep.decode.prompt import encode, question
from kvkeep.errors import UsageError
from kvkeep.models.loading import Loaded
from kvkeep_lab.peers.base import Peer

Selection = Callable[[Sequence[int]], Sequence[int]]
"""Takes the tokens of a question. Returns those that stand for the text."""
SUMMARISE = "Summarise our conversation so far in a few sentences: names, facts, and what was decided."
_END = re.compile(r"(?<!\d)[.!?\u2026][\"'\u2019\u201d)*]*(?=\s|$)|[\u3002\uff01\uff1f][\u300d\u300f]*")
"""The end of a sentence, with the closing quotes, brackets and asterisks. A point after a number may belong to a
list."""


@dataclass(frozen=True)
class Shortener(Peer):
    """A way to shorten a text before a question about it is read.

    The budget is that of the prompt and the answer together, in tokens.
    """

    @property
    def takes(self) -> tuple[str, ...]:
        return ("budget",)

    def open(self, model: Any, budget: str | None, context: int) -> NoReturn:
        raise UsageError(
            "This method shortens a text before a question about it, so it cannot read a prompt of both; measure it "
            "with a task that asks after the text (needles, locomo, novel)."
        )

    @abstractmethod
    def read(self, loaded: Loaded, text: Sequence[int], limit: int) -> Selection:
        """Read the tokens of a text, and return what selects at most ``limit`` tokens for a question. Raises UsageError
        if the limit is too small."""


@dataclass(frozen=True)
class Truncated(Shortener):
    """The end of the text."""

    about: ClassVar[str] = "the newest tokens of the text (truncation), in a full cache"

    def read(self, loaded: Loaded, text: Sequence[int], limit: int) -> Selection:
        newest = text[-limit:]
        return lambda question: newest


@dataclass(frozen=True)
class Retrieved(Shortener):
    """The chunks that match the question best (:class:`~kvkeep.decode.excerpts.Excerpts`)."""

    about: ClassVar[str] = "the chunks of the text that BM25 finds for the question, in a full cache"

    size: int = CHUNK_TOKENS
    """Maximum tokens of a chunk, which ends at a sentence's end if there is one in its second half."""

    def read(self, loaded: Loaded, text: Sequence[int], limit: int) -> Selection:
        if limit >= len(text):
            return lambda question: text
        index, tokenizer = Excerpts(loaded.tokenizer, text, self.size), loaded.tokenizer

        def selected(question: Sequence[int]) -> Sequence[int]:
            spans = index.spans(index.scores(tokenizer.decode(question, skip_special_tokens=True)), limit)
            return [token for start, stop in spans for token in text[start:stop]]

        return selected


@dataclass(frozen=True)
class Summarised(Shortener):
    """Where the limit is reached, the model replaces the older half, and the summary before it, by a summary. The
    newest tokens stay as they are."""

    about: ClassVar[str] = "the model's own summary of the older text, and its newest tokens, in a full cache"

    tokens: int = 256
    """Maximum tokens of a summary."""

    def read(self, loaded: Loaded, text: Sequence[int], limit: int) -> Selection:
        if limit < 3 * self.tokens:
            raise UsageError(
                f"A summary of {self.tokens} tokens takes more than a third of the {limit} tokens for the text; give a "
                "larger budget, or a shorter summary (prompt-summary:tokens=64)."
            )
        summary: list[int] = []
        start = 0
        while len(text) - start > limit - len(summary):
            stop = start + limit // 2
            summary = self._written(loaded, [*summary, *text[start:stop]])
            start = stop
        found = [*summary, *text[start:]]
        return lambda question: found

    def _written(self, loaded: Loaded, text: Sequence[int]) -> list[int]:
        """Return the tokens of a summary of ``text``, cut after a complete sentence."""
        model, tokenizer = loaded.model, loaded.tokenizer
        prompt = encode(tokenizer, question(tokenizer.decode(text), SUMMARISE))
        cache = KeepCache(model, "full", context=len(prompt) + self.tokens)
        made = generate(model, tokenizer, prompt, cache, max_new_tokens=self.tokens)
        words = made.text if made.stopped == "eos" else whole_sentences(made.text)
        return list(tokenizer(f"{words.strip()}\n\n", add_special_tokens=False).input_ids)[: self.tokens]


def whole_sentences(text: str) -> str:
    """Return a text up to the end of its last complete sentence, or all of it if it has none."""
    *_, end = (0, *(one.end() for one in _END.finditer(text)))
    return (text[:end] if end else text).strip()
