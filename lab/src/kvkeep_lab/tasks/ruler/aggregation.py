"""RULER's aggregation: the words of a list that come most often, English ones (cwe) or made-up ones (fwe)."""

from __future__ import annotations

import math
import random
import string

from kvkeep_lab.tasks.ruler.family import Asked
from kvkeep_lab.tasks.ruler.vocabulary import WORDS

COMMON = 10
_COMMON_TEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
_COMMON_LEAD = "Answer: The top 10 words that appear most often in the list are:"
_FREQUENT_TEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
_FREQUENT_LEAD = "Answer: According to the coded text above, the three most frequently appeared words are:"
_ZETA_2 = math.pi**2 / 6  # what a Zipf distribution of exponent 2 sums to
_LETTERS = 6


def common_words(loaded: None, draw: random.Random, size: int, length: int) -> Asked:
    """Return a question about a list of ``size`` different words, ten of them more common, after an example that is
    answered. From 4,096 tokens on the common ones come 30 times and the others 3 times, below 6 times and once."""
    small = length < 4096
    example = _list(draw, *((20, 3, 1) if small else (40, 10, 3)))
    asked = _list(draw, size, *((6, 1) if small else (30, 3)))
    return Asked(f"{example.text} {example.lead} {example.right}\n{asked.text}", asked.lead, asked.answers, asked.right)


def _list(draw: random.Random, size: int, often: int, seldom: int) -> Asked:
    drawn = draw.sample(WORDS, size)
    common, others = drawn[:COMMON], drawn[COMMON:]
    listed = common * often + others * seldom
    draw.shuffle(listed)
    return Asked(_COMMON_TEXT.format(context=_numbered(listed)), _COMMON_LEAD, common, _numbered(common))


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def frequent_words(loaded: None, draw: random.Random, size: int, length: int) -> Asked:
    """Return a question about some ``size`` made-up words, the k-th most frequent of which has a share that falls as
    k**-2; the most frequent one is dots, and does not count."""
    words: list[str] = []
    while len(words) < max(length // 50, 5):
        word = "".join(draw.choices(string.ascii_lowercase, k=_LETTERS))
        words += [] if word in words else [word]
    words[0] = "..."
    counts = [int(size * rank**-2 / _ZETA_2) for rank in range(1, len(words) + 1)]
    listed = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    draw.shuffle(listed)
    return Asked(_FREQUENT_TEXT.format(context=" ".join(listed)), _FREQUENT_LEAD, words[1:4], " ".join(words[1:4]))
