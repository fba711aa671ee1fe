"""LongBench's scores of an answer: a share from 0 to 1 for each right answer. The best one counts.

The scores follow the definitions in LongBench's ``metrics.py``, and in the packages ``rouge`` 1.0.1 and ``fuzzywuzzy``
0.18 that it calls. These packages are not needed here.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

Judge = Callable[[str, str, Sequence[str]], float]
"""Called with the answer, the right answer, and the names of all classes."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def qa_f1(text: str, right: str, classes: Sequence[str] = ()) -> float:
    """Return the F1 of the words as in SQuAD: lower case, without punctuation and articles."""
    written, wanted = Counter(_words(text)), Counter(_words(right))
    common = (written & wanted).total()
    return 2 * common / (written.total() + wanted.total()) if common else 0.0


def rouge_l(text: str, right: str, classes: Sequence[str] = ()) -> float:
    """Return the ROUGE-L of complete summaries as in the package ``rouge``. Words end at spaces, sentences at full
    stops. Case and word endings matter, and each *different* word counts once.

    The common subsequences of every sentence of ``right`` and every sentence of ``text`` form one set of words. F1
    compares the size of this set with the sizes of the sets of all words.

    rouge-score, which task ``summary`` uses, has one sequence of stemmed lower-case words and counts repeated words.
    The two scores are not comparable. For sentences of about a thousand words in total, the recursion of ``rouge``
    fails, and LongBench scores 0. Here such sentences are scored.
    """
    written, wanted = _sentences(text), _sentences(right)
    if not written or not wanted:
        return 0.0
    common = {word for sentence in wanted for other in written for word in _in_common(sentence, other)}
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    precision = len(common) / len({word for sentence in written for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def classification(text: str, right: str, classes: Sequence[str] = ()) -> float:
    """Return 1 divided by the number of classes that ``text`` names if the right one is among them, else 0. Classes
    whose names are part of the right one's name do not count."""
    named = [name for name in classes if name in text and (name == right or name not in right)]
    return 1 / len(named) if right in named else 0.0


def retrieval(text: str, right: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the numbers in ``text`` that equal the number of ``right``, "Paragraph 12"."""
    found = re.search(r"Paragraph (\d+)", right)
    return count(text, found[1]) if found else 0.0


def count(text: str, right: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the numbers in ``text`` that equal ``right``."""
    numbers = re.findall(r"\d+", text)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def code_similarity(text: str, right: str, classes: Sequence[str] = ()) -> float:
    """Return the similarity of the first line of code to ``right`` by difflib's blocks, rounded to percent. Lines with
    a backtick, ``#`` or ``//`` are skipped."""
    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, right).ratio()) / 100


JUDGES: dict[str, Judge] = {
    judge.__name__: judge for judge in (qa_f1, rouge_l, classification, retrieval, count, code_similarity)
}
"""The judges by name."""


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence. A sentence of spaces has one empty word, as in the package."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _in_common(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Return the longest common subsequence. Among several, return the package's: its backward search moves in
    ``right`` if both directions are equally long."""
    table = [[0] * (len(right) + 1)]
    for word in left:
        row = [0]
        for place, other in enumerate(right):
            row.append(table[-1][place] + 1 if word == other else max(table[-1][place + 1], row[-1]))
        table.append(row)
    found, one, two = [], len(left), len(right)
    while one and two:
        if left[one - 1] == right[two - 1]:
            found.append(left[one - 1])
            one, two = one - 1, two - 1
        elif table[one - 1][two] > table[one][two - 1]:
            one -= 1
        else:
            two -= 1
    return found
