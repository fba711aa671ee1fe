"""RULER's needles: one, several keys, several values, or several questions, in noise, essays, or other needles."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvkeep_lab.tasks.ruler.family import Asked
from kvkeep_lab.tasks.ruler.vocabulary import ADJECTIVES, NOUNS
from kvkeep_lab.tasks.texts import joined

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text?",
    "The special magic {kind} for {query} mentioned in the provided text is",
)
_MANY = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text?",
    "The special magic {kind} for {query} mentioned in the provided text are",
)
_DEPTHS = [round(100 * place / 39) for place in range(40)]
"""Where needles may lie in essays, in percent of the sentences."""


@dataclass(frozen=True)
class Niah:
    """keys, values: what they are. needles: how many keys have one; each: values a key has; asked: keys that are asked
    for."""

    haystack: Literal["noise", "essays", "needles"]
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    needles: int = 1
    each: int = 1
    asked: int = 1

    def __call__(self, essays: list[str] | None, draw: random.Random, size: int, length: int) -> Asked:
        """Return a question about ``size`` words of ``essays``, or ``size`` lines of the other haystacks."""
        pairs: dict[str, list[str]] = {}
        while len(pairs) < max(self.needles, self.asked):
            pairs[_drawn(draw, self.keys)] = [_drawn(draw, self.values) for _ in range(self.each)]
        needles = [self._needle(key, value) for key, values in pairs.items() for value in values]
        draw.shuffle(needles)
        queries = draw.sample(list(pairs), self.asked)
        answers = [value for key in queries for value in pairs[key]]
        if self.haystack == "essays":
            assert essays is not None
            context = _between_sentences(essays, needles, draw, size)
        else:
            context = "\n".join(self._lines(set(pairs), needles, draw, size))
        query = f"{', '.join(queries[:-1])}, and {queries[-1]}" if len(queries) > 1 else queries[0]
        text, lead = _ONE if len(answers) == 1 else _MANY
        kind = self.values.removesuffix("s") if len(answers) == 1 else self.values
        return Asked(
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
        if self.haystack == "needles":  # for other keys than those asked for
            lines = [self._needle(_other(draw, self.keys, taken), _drawn(draw, self.values)) for _ in range(size)]
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return lines


def words(paths: Sequence[Path]) -> list[str]:
    """Return all words of the essays in a row."""
    return joined(paths).split()


def _between_sentences(essays: list[str], needles: list[str], draw: random.Random, size: int) -> str:
    text = " ".join((essays * (size // len(essays) + 1))[:size])
    sentences = re.split(r"(?<=[.!?]) ", text)
    places = sorted((len(sentences) * depth // 100 for depth in draw.sample(_DEPTHS, len(needles))), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        sentences.insert(place, needle)
    return " ".join(sentences)


def _other(draw: random.Random, kind: str, taken: set[str]) -> str:
    while (drawn := _drawn(draw, kind)) in taken:
        pass
    return drawn


def _drawn(draw: random.Random, kind: str) -> str:
    if kind == "words":
        return f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"
    if kind == "uuids":
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))
    return str(draw.randint(10**6, 10**7 - 1))
