"""Excerpts: the chunks of a long text that have the words of a question, found by BM25 (Robertson and Zaragoza, "The
Probabilistic Relevance Framework", 2009). A model reads them in place of the text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

SIZE = 128
"""Maximum tokens of a chunk."""
K1, B = 1.2, 0.75
"""The saturation of repeated words, and the correction for a text's length."""


class Excerpted(NamedTuple):
    """What is read of a text."""

    text: str
    tokens: int
    of: int
    """The tokens of the whole text."""


def excerpt(tokenizer: Any, text: str, question: str, limit: int) -> Excerpted:
    """Return at most ``limit`` tokens of ``text``: its :class:`Excerpts` for ``question``, or all of a shorter text."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(ids) <= limit:
        return Excerpted(text, len(ids), len(ids))
    found = Excerpts(tokenizer, ids).select(question, limit)
    return Excerpted(tokenizer.decode(found), len(found), len(ids))


class Excerpts:
    """A text in chunks of at most ``size`` tokens, of which questions select some. text: at least one token."""

    def __init__(self, tokenizer: Any, text: Sequence[int], size: int = SIZE) -> None:
        self._parts = list(chunks(tokenizer, text, size))
        self._index = BM25([tokenizer.decode(part) for part in self._parts])

    def select(self, question: str, limit: int) -> list[int]:
        """Return the tokens of the chunks that match the question best, at most ``limit``, in the order of the text. Of
        equal chunks, the newest come first."""
        scores = self._index.scores(question)
        chosen, left = list[int](), limit
        for place in sorted(range(len(scores)), key=lambda place: (scores[place], place), reverse=True):
            if len(self._parts[place]) > left:
                break
            chosen.append(place)
            left -= len(self._parts[place])
        return [token for place in sorted(chosen) for token in self._parts[place]]


def chunks(tokenizer: Any, text: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield ``text`` in chunks of at most ``size`` tokens. A chunk ends after the last token in its second half that
    ends a sentence or a line, if there is one."""
    ends = {token for token in set(text) if set(tokenizer.decode([token])) & set(".!?\n")}
    start = 0
    while start < len(text):
        stop = min(start + size, len(text))
        if stop < len(text):
            stop = next((place + 1 for place in range(stop - 1, start + size // 2, -1) if text[place] in ends), stop)
        yield text[start:stop]
        start = stop


class BM25:
    """An index of texts (at least one)."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._counts = [Counter(words(text)) for text in texts]
        self._lengths = [counts.total() for counts in self._counts]
        self._mean = max(fmean(self._lengths), 1)
        self._holders = Counter(word for counts in self._counts for word in counts)
        """Number of texts that have each word."""

    def scores(self, question: str) -> list[float]:
        """Return the score of each text. A word that the question repeats counts once."""
        wanted = {word: self._weight(word) for word in words(question) if word in self._holders}
        return [
            math.fsum(
                weight * counts[word] * (K1 + 1) / (counts[word] + K1 * (1 - B + B * length / self._mean))
                for word, weight in wanted.items()
            )
            for counts, length in zip(self._counts, self._lengths, strict=True)
        ]

    def _weight(self, word: str) -> float:
        """Return the inverse document frequency, in Lucene's form, which is never negative."""
        holders = self._holders[word]
        return math.log(1 + (len(self._counts) - holders + 0.5) / (holders + 0.5))


def words(text: str) -> list[str]:
    """Return the words of a text without their case."""
    return re.findall(r"\w+", text.casefold())
