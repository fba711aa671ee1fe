"""LongBench's scores, held against values of its own code's parts and against a hand."""

from __future__ import annotations

import random

import pytest
from kvkeep_lab.tasks.longbench_scores import classification, code_similarity, count, qa_f1, retrieval, rouge_l


@pytest.mark.parametrize(
    ("text", "right", "expected"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("It is the Eiffel Tower in Paris", "Eiffel Tower", 2 * (2 / 6) * 1 / (2 / 6 + 1)),  # without "the"
        ("paris, paris", "Paris", 2 * (1 / 2) * 1 / (1 / 2 + 1)),  # a word counts as often as both have it
        ("don't", "dont", 1.0),
        ("theory of an idea", "of idea", 2 * (2 / 3) * 1 / (2 / 3 + 1)),  # articles go as words, not as letters
        ("", "Paris", 0.0),
        ("the", "a", 0.0),
        ("London", "Paris", 0.0),
    ],
)
def test_f1_of_words(text: str, right: str, expected: float) -> None:
    assert qa_f1(text, right) == pytest.approx(expected)


# The example of the package's README, broken words and all, and what it prints for it: p 19/36, r 19/49.
HYPOTHESIS = (
    "the #### transcript is a written version of each day 's cnn student news program use this transcript to he    lp "
    "students with reading comprehension and vocabulary use the weekly newsquiz to test your knowledge of storie s you "
    "    saw on cnn student news"
)
REFERENCE = (
    "this page includes the show transcript use the transcript to help students with reading comprehension and     "
    "vocabulary at the bottom of the page , comment for a chance to be mentioned on cnn student news . you must be a "
    "teac    her or a student age # # or older to request a mention on the cnn student news roll call . the "
    "weekly newsquiz tests     students ' knowledge of even ts in the news"
)


def test_rouge_as_the_package_prints_it() -> None:
    assert rouge_l(HYPOTHESIS, REFERENCE) == pytest.approx(0.44705881864636676, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "right", "expected"),
    [
        ("the cat sat", "the cat sat", 1.0),
        ("the cat sat", "the cat ran", 2 / 3),
        ("The cat sat", "the cat sat", 2 / 3),  # case counts
        ("the cats sat", "the cat sat", 2 / 3),  # and so do endings
        ("sat cat the", "the cat sat", 1 / 3),  # order within a sentence
        ("c d. a b", "a b. c d", 1.0),  # but not of sentences
        ("the the the the", "the", 1.0),  # a word counts once
        ("a b a c", "a b", 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("a b. ", "a b", 2 * (2 / 3) * 1 / (2 / 3 + 1)),  # what follows the last stop is a word, if it is a space
        ("", "a b", 0.0),
        ("...", "a b", 0.0),
        ("x y", "a b", 0.0),
    ],
)
def test_rouge_by_hand(text: str, right: str, expected: float) -> None:
    assert rouge_l(text, right) == pytest.approx(expected, abs=1e-7)


def slow_common(left: list[str], right: list[str]) -> list[str]:
    """The definition: by recursion, from the ends."""
    if not left or not right:
        return []
    if left[-1] == right[-1]:
        return [*slow_common(left[:-1], right[:-1]), left[-1]]
    one, other = slow_common(left[:-1], right), slow_common(left, right[:-1])
    return one if len(one) > len(other) else other


def test_rouge_agrees_with_its_definition() -> None:
    draw = random.Random(0)
    for _ in range(60):
        said, wanted = ([draw.choices("abcdef", k=draw.randrange(1, 7)) for _ in range(2)] for _ in range(2))
        common = {word for one in wanted for other in said for word in slow_common(one, other)}
        recall, precision = len(common) / len({*wanted[0], *wanted[1]}), len(common) / len({*said[0], *said[1]})
        expected = 2 * precision * recall / (precision + recall + 1e-8)
        found = rouge_l(*(".".join(" ".join(words) for words in part) for part in (said, wanted)))
        assert found == pytest.approx(expected)


def test_rouge_of_sentences_that_the_package_fails_at() -> None:
    words = [f"w{number}" for number in range(1500)]
    assert rouge_l(" ".join(words), " ".join(words[::2])) == pytest.approx(2 / 3, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "right", "expected"),
    [
        ("Type: Other location", "Other location", 1.0),  # "location" is part of the right one
        ("Sport or Food", "Sport", 1 / 2),
        ("Sport", "Food", 0.0),
        ("sport", "Sport", 0.0),
        ("location", "Other location", 0.0),
        ("", "Sport", 0.0),
    ],
)
def test_classes(text: str, right: str, expected: float) -> None:
    assert classification(text, right, ["Food", "Sport", "location", "Other location"]) == expected


def test_numbers() -> None:
    assert count("17", "17") == 1.0 and count("17 of 30, no: 17", "17") == 2 / 3
    assert count("none", "17") == 0.0 and count("170", "17") == 0.0 and count("1 7", "17") == 0.0
    assert retrieval("Paragraph 12", "Paragraph 12") == 1.0
    assert retrieval("Paragraphs 1 and 12", "Paragraph 12") == 1 / 2 and retrieval("twelve", "Paragraph 12") == 0.0


@pytest.mark.parametrize(
    ("text", "right", "expected"),
    [
        ("return a + b", "return a + b", 1.0),
        ("\n\n# adds\n// so\n```python\nabcd\nrest", "abxd", 0.75),  # ab and d: 2 * 3 / 8
        ("# all is comment", "x", 0.0),
        ("abc", "abcdefg", 0.6),
        ("abc", "ab", 0.8),
        ("ab", "abcd", 0.67),  # in whole percent
    ],
)
def test_lines_of_code(text: str, right: str, expected: float) -> None:
    assert code_similarity(text, right) == expected
