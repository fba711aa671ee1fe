"""Needles at all depths of one text, asked for after the text was read, or together with it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvkeep.errors import UsageError
from kvkeep_lab.cell import Point
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome, among
from kvkeep_lab.tasks.ruler.generated import MANY, NEEDLE, NOISE, ONE, drawn
from kvkeep_lab.tasks.ruler.task import largest, string_match
from kvkeep_lab.tasks.texts import begun, joined, read_once, text_files


@dataclass(frozen=True)
class _Kind:
    """A kind of needles in a text."""

    values: Literal["numbers", "uuids"] = "numbers"
    keys: int = 10
    """Number of questions about a text."""
    each: int = 1
    """Number of values of a key."""
    noise: bool = False
    """Whether the needles lie in RULER's noise instead of essays."""


KINDS = {
    "noise": _Kind(noise=True),
    "essays": _Kind(),
    "uuids": _Kind("uuids"),
    "values": _Kind(keys=3, each=4),
}
"""The kinds by name. RULER's families with the same sentences: niah_single_1, _2, _3, and niah_multivalue."""


class Needles(Task):
    """Length × way of asking × kind of needles. A length includes prompt and answer."""

    name = "needles"
    about = "RULER's needles at all depths of one text, with the question seen or unseen while it is read"
    protocol = (
        "RULER's sentences of single needles (noise: numbers in noise; essays: numbers; uuids: uuids in essays) and of "
        "several values (values: four numbers of a key in essays), but a text has many of them: ten needles in the "
        "middle of each tenth, or three keys of four values. Unseen: the text is read in chunks within the budget, and "
        "each question is asked to a copy of the cache, so the method does not know it when it evicts entries. Seen: "
        "text and question are read in one pass before entries are evicted (+oneshot). The answer's first words are "
        "given. String match: the share of the values in what is written greedily after them. ln p: the mean of the "
        "right answer's tokens, given one by one. A text longer than all "
        "essays repeats them, and noise repeats itself."
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("loglik", "ln p a token", "higher", "number"),
        Metric("match", "string match"),
    )
    relative = ("loglik", "match")
    axes = ("length", "kind", "question")

    length: list[Annotated[int, Field(ge=64)]] = Field([4096], min_length=1, description="tokens, answer included")
    question: list[Literal["unseen", "seen"]] = Field(["unseen"], min_length=1, description="unseen, seen")
    kind: list[Annotated[str, among("kind of needles", KINDS)]] = Field(
        ["essays"], min_length=1, description=", ".join(KINDS)
    )
    seen: int = Field(2, ge=1, description="number of a text's questions that are asked if the question is seen")

    def sources(self, data: Path | None) -> list[Path]:
        return text_files(data)

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Make ``samples`` texts, and a sample for each of their questions. If the question is seen, only :attr:`seen`
        questions are asked about a text, and about the next text the questions that follow."""
        words, length, kind = joined(sources).split(), int(point["length"]), KINDS[str(point["kind"])]
        made = []
        for number in range(self.samples):
            samples = _samples(tokenizer, words, length, kind, f"{seed}/{point['kind']}/{number}")
            if point["question"] == "seen":
                first = self.seen * (seed * self.samples + number)
                chosen = (samples[(first + turn) % len(samples)] for turn in range(self.seen))
                samples = [replace(sample, facts=sample.facts | {"seen": True}) for sample in chosen]
            made += samples
        return made

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        facts = sample.facts
        if facts["seen"]:
            answer = subject.at_once().examine([*facts["text"].ids, *sample.ids], facts["right"], facts["new"])
        else:
            answer = subject.examine_after(facts["text"], sample.ids, facts["right"], facts["new"])
        scores = {"loglik": fmean(answer.logs), "match": string_match(answer.text, facts["answers"], some=False)}
        return TaskOutcome(scores, answer.cost, facts["depth"])


def _samples(tokenizer: Any, words: Sequence[str], length: int, kind: _Kind, key: str) -> list[Sample]:
    """Return the samples of the largest text that fits into ``length`` tokens with its longest question. Equal keys
    give equal texts."""

    def made(size: int) -> tuple[str, list[_Needle]]:
        return _text(words, kind, size, random.Random(key))

    def encoded(text: str, needle: _Needle) -> list[int]:
        return _prompt(tokenizer, kind, text, ONE if kind.each == 1 else MANY, needle.key)

    def tokens(size: int) -> int:
        """Encode the text once: another question adds what it adds to a short text."""
        text, needles = made(size)
        short = [len(encoded("Here.", needle)) + len(_right(tokenizer, needle)) for needle in needles]
        return len(encoded(text, needles[0])) + max(short) - len(encoded("Here.", needles[0]))

    size = largest(tokens, length, kind.keys * kind.each, None)
    if size is None:
        raise UsageError(
            f"A length of {length} tokens has no room for {kind.keys * kind.each} needles; give a greater one."
        )
    context, needles = made(size)
    prompts = [encoded(context, needle) for needle in needles]
    shared, opening = (_prompt(tokenizer, kind, part, _NO_QUESTION, "") for part in (context, ""))
    text, questions = read_once(prompts, shared, opening, length)
    return [
        Sample(
            ids,
            {
                "text": text,
                "seen": False,
                "right": (right := _right(tokenizer, needle)),
                "new": len(right) + 2,
                "answers": needle.values,
                "depth": needle.depth,
            },
        )
        for ids, needle in zip(questions, needles, strict=True)
    ]


@dataclass(frozen=True)
class _Needle:
    """A key with its values."""

    key: str
    values: list[str]
    depth: float
    """The depth of its sentence in percent of the text; the mean of several."""


def _text(words: Sequence[str], kind: _Kind, size: int, draw: random.Random) -> tuple[str, list[_Needle]]:
    """Return a text of ``size`` words (or lines of noise) with the needles, and the needles by depth. The needle of
    number n of N lies after (n + 1/2) / N of the sentences."""
    count = kind.keys * kind.each
    keys: dict[str, None] = {}
    while len(keys) < kind.keys:
        keys[drawn(draw, "words")] = None
    order = [key for key in keys for _ in range(kind.each)]
    draw.shuffle(order)
    values = [drawn(draw, kind.values) for _ in order]
    start = draw.randrange(len(words))
    essays = (words[(start + number) % len(words)] for number in range(size))
    sentences = [NOISE] * size if kind.noise else re.split(r"(?<=[.!?]) ", " ".join(essays))
    places = [round(len(sentences) * (number + 0.5) / count) for number in range(count)]
    needles = zip(places, order, values, strict=True)
    for place, key, value in reversed(list(needles)):
        sentences.insert(place, NEEDLE.format(kind=kind.values, key=key, value=value))
    depths = [100 * (number + 0.5) / count for number in range(count)]
    found = []
    for key in keys:
        mine = [number for number, one in enumerate(order) if one == key]
        found.append(_Needle(key, [values[number] for number in mine], fmean(depths[number] for number in mine)))
    return ("\n" if kind.noise else " ").join(sentences), sorted(found, key=lambda needle: needle.depth)


_NO_QUESTION = ("\n{context}\nand", "")
"""A message with the same text and no question."""


def _prompt(tokenizer: Any, kind: _Kind, text: str, ask: tuple[str, str], key: str) -> list[int]:
    """Return the ids of the message with a question and of the beginning of its answer. The introduction is the same
    for all questions."""
    about = {"kind": kind.values.removesuffix("s") if kind.each == 1 else kind.values, "query": key}
    introduction = MANY[0].partition("\n")[0].format(kind=kind.values)
    message = introduction + "\n" + ask[0].partition("\n")[2].format(context=text, **about)
    return begun(tokenizer, message, None, ask[1].format(**about), " ")


def _right(tokenizer: Any, needle: _Needle) -> list[int]:
    return list(tokenizer(f" {', '.join(needle.values)}", add_special_tokens=False).input_ids)
