"""RULER's questions that are generated from seeds: needles (niah), variable tracking (vt), common and frequent words
(cwe, fwe)."""

from __future__ import annotations

import math
import random
import re
import string
import tomllib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Literal

from kvkeep_lab.tasks.texts import joined


@dataclass(frozen=True)
class RulerQuestion:
    """One question."""

    text: str
    """The user's message."""
    lead: str
    """The beginning of the answer, given to the model."""
    answers: list[str]
    """Strings that the answer must contain."""
    right: str
    """The right continuation of ``lead``, without the space before it."""


LISTS: dict[str, list[str]] = {
    kind: words.split()
    for kind, words in tomllib.loads(
        resources.files("kvkeep_lab.tasks.ruler").joinpath("words.toml").read_text("utf-8")
    ).items()
}
"""Nouns, adjectives and verbs."""

WORDS = sorted({word for words in LISTS.values() for word in words})

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text?",
    "The special magic {kind} for {query} mentioned in the provided text is",
)
"""A question with one answer: the user's message and the beginning of the answer."""
MANY = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text?",
    "The special magic {kind} for {query} mentioned in the provided text are",
)
"""A question with several answers."""
_DEPTHS = [round(100 * place / 39) for place in range(40)]
"""Possible depths of needles in essays, in percent of the sentences."""


@dataclass(frozen=True)
class Niah:
    """The needle-in-a-haystack tasks. A needle states a value of a key."""

    haystack: Literal["noise", "essays", "needles"]
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    needles: int = 1
    """Number of keys with needles."""
    each: int = 1
    """Number of values of a key."""
    queried: int = 1
    """Number of keys in the question."""

    def __call__(self, essays: list[str] | None, draw: random.Random, size: int, length: int) -> RulerQuestion:
        """Return a question about ``size`` words of ``essays``, or ``size`` lines of the other haystacks."""
        pairs: dict[str, list[str]] = {}
        while len(pairs) < max(self.needles, self.queried):
            pairs[drawn(draw, self.keys)] = [drawn(draw, self.values) for _ in range(self.each)]
        needles = [self._needle(key, value) for key, values in pairs.items() for value in values]
        draw.shuffle(needles)
        queries = draw.sample(list(pairs), self.queried)
        answers = [value for key in queries for value in pairs[key]]
        if self.haystack == "essays":
            assert essays is not None
            context = _between_sentences(essays, needles, draw, size)
        else:
            context = "\n".join(self._lines(set(pairs), needles, draw, size))
        query = f"{', '.join(queries[:-1])}, and {queries[-1]}" if len(queries) > 1 else queries[0]
        text, lead = ONE if len(answers) == 1 else MANY
        kind = self.values.removesuffix("s") if len(answers) == 1 else self.values
        return RulerQuestion(
            text.format(kind=kind, context=context, query=query),
            lead.format(kind=kind, query=query),
            answers,
            ", ".join(answers),
        )

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.values, key=key, value=value)

    def _lines(self, taken: set[str], needles: list[str], draw: random.Random, size: int) -> list[str]:
        lines = [NOISE] * size
        places = sorted(draw.sample(range(size), len(needles)), reverse=True)
        if self.haystack == "needles":  # needles of keys that are not in the question
            lines = [self._needle(_other(draw, self.keys, taken), drawn(draw, self.values)) for _ in range(size)]
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return lines


def words(paths: Sequence[Path]) -> list[str]:
    """Return all words of the essays in order."""
    return joined(paths).split()


def _between_sentences(essays: list[str], needles: list[str], draw: random.Random, size: int) -> str:
    text = " ".join((essays * (size // len(essays) + 1))[:size])
    sentences = re.split(r"(?<=[.!?]) ", text)
    places = sorted((len(sentences) * depth // 100 for depth in draw.sample(_DEPTHS, len(needles))), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        sentences.insert(place, needle)
    return " ".join(sentences)


def _other(draw: random.Random, kind: str, taken: set[str]) -> str:
    while (one := drawn(draw, kind)) in taken:
        pass
    return one


def drawn(draw: random.Random, kind: str) -> str:
    """Return a new key or value: "words" (adjective and noun), "uuids", or "numbers" (of seven digits)."""
    if kind == "words":
        return f"{draw.choice(LISTS['adjectives'])}-{draw.choice(LISTS['nouns'])}"
    if kind == "uuids":
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))
    return str(draw.randint(10**6, 10**7 - 1))


HOPS = 4
_TRACKING_TEXT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above."
)
_TRACKING_LEAD = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {query}, they are:"
)


def track(loaded: None, draw: random.Random, size: int, length: int) -> RulerQuestion:
    """Return a question about one chain among ``size`` lines of noise, after an answered example. The example has ten
    lines of noise, as RULER's at most lengths, and fewer below 4,000 tokens."""
    example = _chain(draw, min(10, max(1, length // 400)), letters=3)
    question = _chain(draw, size, letters=5)
    return RulerQuestion(
        f"{example.text} {example.lead} {example.right}\n\n{question.text}",
        question.lead,
        question.answers,
        question.right,
    )


def _chain(draw: random.Random, size: int, letters: int) -> RulerQuestion:
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(draw.choices(string.ascii_uppercase, k=letters))
        names += [] if name in names else [name]
    value = str(draw.randrange(10_000, 99_999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    lines = [f"{NOISE}\n"] * size
    if size <= len(chain):  # splits the noise into sentences, for enough places
        lines = [f"{sentence.strip()}." for sentence in NOISE.split(".") if sentence] * size
    for number, place in enumerate(sorted(draw.sample(range(len(lines)), len(chain)))):
        lines.insert(place + number, chain[number])
    context = " ".join(lines)
    return RulerQuestion(
        _TRACKING_TEXT.format(context=context, query=value),
        _TRACKING_LEAD.format(count=len(names), query=value),
        names,
        " ".join(names),
    )


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
_ZETA_2 = math.pi**2 / 6  # sum of k**-2, for a Zipf distribution of exponent 2
_LETTERS = 6


def common_words(loaded: None, draw: random.Random, size: int, length: int) -> RulerQuestion:
    """Return a question about a list of ``size`` different words, ten of them more common, after an answered example.
    From 4,096 tokens on, the common words occur 30 times and the others 3 times. Below, they occur 6 times and once."""
    small = length < 4096
    example = _list(draw, *((20, 3, 1) if small else (40, 10, 3)))
    question = _list(draw, size, *((6, 1) if small else (30, 3)))
    return RulerQuestion(
        f"{example.text} {example.lead} {example.right}\n{question.text}",
        question.lead,
        question.answers,
        question.right,
    )


def _list(draw: random.Random, size: int, often: int, seldom: int) -> RulerQuestion:
    drawn = draw.sample(WORDS, size)
    common, others = drawn[:COMMON], drawn[COMMON:]
    listed = common * often + others * seldom
    draw.shuffle(listed)
    return RulerQuestion(_COMMON_TEXT.format(context=_numbered(listed)), _COMMON_LEAD, common, _numbered(common))


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def frequent_words(loaded: None, draw: random.Random, size: int, length: int) -> RulerQuestion:
    """Return a question about approximately ``size`` artificial words. The share of the k-th most frequent word is
    proportional to k**-2. The most frequent one consists of dots and does not count."""
    words: list[str] = []
    while len(words) < max(length // 50, 5):
        word = "".join(draw.choices(string.ascii_lowercase, k=_LETTERS))
        words += [] if word in words else [word]
    words[0] = "..."
    counts = [int(size * rank**-2 / _ZETA_2) for rank in range(1, len(words) + 1)]
    listed = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    draw.shuffle(listed)
    return RulerQuestion(
        _FREQUENT_TEXT.format(context=" ".join(listed)), _FREQUENT_LEAD, words[1:4], " ".join(words[1:4])
    )
