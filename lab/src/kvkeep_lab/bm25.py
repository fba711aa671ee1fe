"""BM25: which of several texts have the words of a question. Robertson and Zaragoza, "The Probabilistic Relevance
Framework" (2009)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

K1, B = 1.2, 0.75
"""The saturation of repeated words, and the correction for a text's length."""


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
