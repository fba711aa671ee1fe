"""LongBench's scores of an answer: a share from 0 to 1 for each right answer, the best of which counts.

Written after the definitions of its ``metrics.py``, and of the packages ``rouge`` 1.0.1 and ``fuzzywuzzy`` 0.18 that it
calls, of which neither is needed here.
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
    """F1 of the words, as SQuAD has them: lower case, no punctuation, no articles."""
    written, wanted = Counter(_words(text)), Counter(_words(right))
    common = (written & wanted).total()
    return 2 * common / (written.total() + wanted.total()) if common else 0.0


def rouge_l(text: str, right: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L of whole summaries, as the package ``rouge`` has it: words end at spaces, sentences at full stops, case
    and endings count, and each *different* word counts once.

    What each sentence of ``right`` has in common with each of ``text``, in order, makes one set; F1 is of its size by
    those of the sets of all words. rouge-score, which task ``summary`` uses, has one sequence of stemmed words in lower
    case, repeated words counted, so the two are not to be compared. The package's own recursion fails, and LongBench
    then counts 0, for sentences of about a thousand words together; here they are counted.
    """
    written, wanted = _sentences(text), _sentences(right)
    if not written or not wanted:
        return 0.0
    common = {word for sentence in wanted for other in written for word in _in_common(sentence, other)}
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    precision = len(common) / len({word for sentence in written for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def classification(text: str, right: str, classes: Sequence[str] = ()) -> float:
    """One by the number of classes that ``text`` names, if the right one is among them; classes whose names are part of
    the right one's do not count."""
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
    """How like ``right`` the first line of code is, by difflib's blocks in whole percent; lines with a backtick, ``#``
    or ``//`` are passed over."""
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
    """Return the words of each sentence; one of spaces alone has the empty word, as the package has it."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _in_common(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Return the longest common subsequence, and of several the one that the package finds: walking back from the
    ends, it goes on in ``right`` where both ways are as long."""
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
