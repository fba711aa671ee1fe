"""Excerpts: the chunks of a long text that match a question, found by BM25 (Robertson and Zaragoza, "The
Probabilistic Relevance Framework", 2009). A model reads them in place of the text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple
from unicodedata import normalize

import regex

from kvkeep.decode.prompt import encoding
from kvkeep.errors import UsageError

CHUNK_TOKENS = 128
"""Maximum tokens of a chunk."""
K1, B = 1.2, 0.75
"""The saturation of repeated words, and the correction for a text's length."""
_SPACELESS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
_WORD = regex.compile(rf"{_SPACELESS}|(?:(?!{_SPACELESS})[\w\p{{M}}])+")
"""A word. In scripts without spaces between words, each character counts as one."""


class Excerpted(NamedTuple):
    """What is read of a text."""

    text: str
    tokens: int
    total: int
    """The tokens of the whole text."""


def excerpt(tokenizer: Any, text: str, question: str, limit: int) -> Excerpted:
    """Return about ``limit`` tokens of ``text``: the chunks that match ``question`` best, or all of
    a shorter text. Raises UsageError if the text has no word of the question."""
    with encoding(text):
        encoded = tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
        )
    ids, places = encoded.input_ids, encoded.offset_mapping
    if len(ids) <= limit:
        return Excerpted(text, len(ids), len(ids))
    index = Excerpts(tokenizer, ids)
    scores = index.scores(question)
    if not any(scores):
        raise UsageError(
            "The text has none of the words of the question, so there are no excerpts; ask with words of the text, or "
            "let the model read all of it (without --excerpts)."
        )
    passages = list[list[int]]()
    for start, stop in index.spans(scores, limit):
        if passages and passages[-1][1] == start:
            passages[-1][1] = stop
        else:
            passages.append([start, stop])
    found = "\n\n".join(text[places[start][0] : places[stop - 1][1]] for start, stop in passages)
    count = len(tokenizer(found, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids)
    return Excerpted(found, count, len(ids))


class Excerpts:
    """A text in chunks of at most ``size`` tokens, of which questions select some. text: at least one token."""

    def __init__(self, tokenizer: Any, text: Sequence[int], size: int = CHUNK_TOKENS) -> None:
        self._spans = list(chunks(tokenizer, text, size))
        self._index = BM25([tokenizer.decode(text[start:stop]) for start, stop in self._spans])

    def scores(self, question: str) -> list[float]:
        """Return the score of each chunk."""
        return self._index.scores(question)

    def spans(self, scores: Sequence[float], limit: int) -> list[tuple[int, int]]:
        """Return the first token of each of the chunks with the highest :meth:`scores` above 0, and the first after it,
        in the order of the text. Together they have at most ``limit`` tokens. Of equal chunks the newest come first."""
        chosen, left = list[tuple[int, int]](), limit
        for place in sorted(range(len(scores)), key=lambda place: (scores[place], place), reverse=True):
            start, stop = self._spans[place]
            if stop - start > left or scores[place] <= 0:
                break
            chosen.append((start, stop))
            left -= stop - start
        return sorted(chosen)


def chunks(tokenizer: Any, text: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Yield the chunks of ``text``, of at most ``size`` tokens: the first token of each, and the first after it. A
    chunk ends after the last token in its second half that ends a sentence or a line, if there is one."""
    ends = {token for token in set(text) if set(tokenizer.decode([token])) & set(".!?\n\u3002\uff01\uff1f")}
    start = 0
    while start < len(text):
        stop = min(start + size, len(text))
        if stop < len(text):
            stop = next((place + 1 for place in range(stop - 1, start + size // 2, -1) if text[place] in ends), stop)
        yield start, stop
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
        wanted = {word: self._holders[word] for word in words(question) if word in self._holders}
        count = len(self._counts)  # the inverse document frequency in Lucene's form, which is never negative
        weights = {word: math.log(1 + (count - holders + 0.5) / (holders + 0.5)) for word, holders in wanted.items()}
        return [
            math.fsum(
                weight * counts[word] * (K1 + 1) / (counts[word] + K1 * (1 - B + B * length / self._mean))
                for word, weight in weights.items()
            )
            for counts, length in zip(self._counts, self._lengths, strict=True)
        ]


def words(text: str) -> list[str]:
    """Return the words of a text without their case."""
    return _WORD.findall(normalize("NFKC", text).casefold())
