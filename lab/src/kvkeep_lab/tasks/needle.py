"""A needle in a haystack: one sentence in a long text, and a question that only this sentence answers."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvkeep.errors import UsageError
from kvkeep_lab.cell import Point
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome, among
from kvkeep_lab.tasks.texts import begun, joined, passage_text, text_files

Length = Annotated[int, Field(ge=64)]
Depth = Annotated[float, Field(ge=0, le=100)]


@dataclass(frozen=True)
class NeedleForm:
    """A needle and its question. Each sample draws new values for ``{key}`` and ``{value}``."""

    needle: str
    question: str
    lead: str
    """The beginning of the answer, which is given to the model."""
    value: str = "{value}"
    """The expected continuation."""

    def filled(self, draw: random.Random) -> NeedleForm:
        """Return the form of one sample."""
        drawn = {"key": draw.choice(_KEYS), "value": str(draw.randrange(10_000, 100_000))}
        return NeedleForm(*(part.format(**drawn) for part in (self.needle, self.question, self.lead, self.value)))


_KEYS = ("Oslo", "Lima", "Cairo", "Paris", "Delhi", "Tokyo", "Quito", "Accra", "Hanoi", "Rome", "Dublin", "Prague")

FORMS = {
    "san-francisco": NeedleForm(
        "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.",
        "What is the best thing to do in San Francisco?",
        "The best thing to do in San Francisco is",
        "eat a sandwich and sit in Dolores Park on a sunny day",
    ),
    "magic-number": NeedleForm(
        "The special magic number for {key} is {value}.",
        "What is the special magic number for {key} mentioned in the text?",
        "The special magic number for {key} is",
    ),
    "pass-key": NeedleForm(
        "The pass key is {value}. Remember it. {value} is the pass key.",
        "What is the pass key?",
        "The pass key is",
    ),
}


class Needle(Task):
    """Depth × length: the place of the needle in the haystack, in percent, and the tokens of the complete prompt."""

    name = "needle"
    about = "a needle in a haystack of any texts, by depth and length"
    protocol = (
        "The whole prompt, question last, is read in chunks under the budget: when the needle is read, the question is "
        "not known yet. The answer's first words are given. Found: the answer stands in what is written greedily "
        "after them. ln p: the mean of the right answer's tokens, given one by one."
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("found", "found"),
        Metric("words", "words"),
        Metric("loglik", "ln p a token", "higher", "number"),
    )
    relative = ("found", "loglik")
    mapped = ("found", "loglik")
    axes = ("length", "depth")

    length: list[Length] = Field([512, 1024], min_length=1, description="tokens of the whole prompt")
    depth: list[Depth] = Field([0, 25, 50, 75, 100], min_length=1, description="where the needle lies, in percent")
    form: Annotated[str, among("needle", FORMS)] = Field("magic-number", description=f"the needle: {', '.join(FORMS)}")
    new: int = Field(20, ge=1, description="tokens written")

    def sources(self, data: Path | None) -> list[Path]:
        return text_files(data)

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Insert one needle for each sample; the haystack is the same at every depth."""
        text, length, depth = joined(sources), int(point["length"]), float(point["depth"])
        made = []
        for number in range(self.samples):
            draw = random.Random(f"{seed}/{number}")
            form = FORMS[self.form].filled(draw)
            tokens_left = length - len(_prompt(tokenizer, form, form.needle))
            if tokens_left < 1:
                raise UsageError(f"A length of {length} tokens has no space for the question; give a greater length.")
            hay = passage_text(tokenizer, text, tokens_left, draw)
            ids = _prompt(tokenizer, form, hidden(hay, form.needle, depth))
            right = list(tokenizer(f" {form.value}", add_special_tokens=False).input_ids)
            made.append(Sample(ids, {"value": form.value, "right": right}))
        return made

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        answer, value = subject.examine(sample.ids, sample.facts["right"], self.new), sample.facts["value"]
        scores = {"found": float(contains(answer.text, value)), "words": share(answer.text, value)}
        return TaskOutcome({**scores, "loglik": fmean(answer.logs)}, answer.cost)


def hidden(hay: str, needle: str, depth: float) -> str:
    """Return ``hay`` with ``needle`` at the end of the sentence that is nearest to ``depth`` percent of it."""
    ends = [0, *(found.end() for found in re.finditer(r"[.!?][\"')\]]*\s+", hay)), len(hay)]
    place = min(ends, key=lambda end: abs(end - len(hay) * depth / 100))
    parts = (hay[:place].rstrip(), needle, hay[place:].lstrip())
    return " ".join(part for part in parts if part)


def contains(text: str, value: str) -> bool:
    """Return whether ``text`` contains ``value``, ignoring case and spaces."""
    written, wanted = (f" {' '.join(_words(part))} " for part in (text, value))
    return wanted in written


def share(text: str, value: str) -> float:
    """Return the share of the words of ``value`` that are in ``text``."""
    written, wanted = set(_words(text)), _words(value)
    return fmean(word in written for word in wanted)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _prompt(tokenizer: Any, form: NeedleForm, text: str) -> list[int]:
    return begun(tokenizer, text, form.question, form.lead, "\n\n")
