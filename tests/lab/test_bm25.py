"""BM25, beside its formula written out."""

from __future__ import annotations

from math import log

import pytest
from kvkeep_lab.bm25 import BM25, K1, B

TEXTS = ["The cat sat.", "The dog sat on the cat, the cat!", "A bird sang.", "the the the the"]


def by_the_formula(texts: list[str], question: set[str], place: int) -> float:
    split = [text.lower().replace(".", "").replace(",", "").replace("!", "").split() for text in texts]
    mean = sum(len(words) for words in split) / len(split)
    total = 0.0
    for word in question:
        holders = sum(word in words for words in split)
        count = split[place].count(word)
        weight = log(1 + (len(split) - holders + 0.5) / (holders + 0.5))
        total += weight * count * (K1 + 1) / (count + K1 * (1 - B + B * len(split[place]) / mean))
    return total


@pytest.mark.parametrize("question", ["the cat", "Cat cat CAT?", "bird sat fish", "fish"])
def test_the_scores_are_those_of_the_formula(question: str) -> None:
    words = set(question.lower().strip("?").split())
    expected = [by_the_formula(TEXTS, words, place) for place in range(len(TEXTS))]
    assert BM25(TEXTS).scores(question) == pytest.approx(expected)


def test_a_rare_word_counts_more_than_a_frequent_one() -> None:
    scores = BM25(TEXTS).scores("the bird")
    assert max(range(len(TEXTS)), key=scores.__getitem__) == 2


def test_texts_without_words_score_zero() -> None:
    assert BM25(["", "..."]).scores("cat") == [0, 0]
