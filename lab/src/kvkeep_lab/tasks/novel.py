"""Questions about the first chapters of a novel, asked after the text was read."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvkeep.decode.prompt import encode, question, shortened
from kvkeep.decode.texts import read_text
from kvkeep.errors import UsageError
from kvkeep_lab.cell import Point
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome
from kvkeep_lab.tasks.needle import contains
from kvkeep_lab.tasks.rows import source
from kvkeep_lab.tasks.texts import begun, read_once

FILE = "frankenstein.txt"
_START = "Read the following novel carefully. I will ask you a question about it afterwards.\n\n"


@dataclass(frozen=True)
class NovelQuestion:
    """A question that a sentence of the novel answers."""

    question: str
    lead: str
    """The first words of the answer, given to the model."""
    answers: list[str]
    """The right continuations. The first is scored by ln p; each counts as found."""
    evidence: str
    """The words of the novel that answer the question."""
    rephrased: str
    """The same question without the words of :attr:`evidence`."""
    rephrased_lead: str
    """The first words of its answer."""


QUESTIONS = tuple(
    NovelQuestion(**one)
    for one in tomllib.loads(resources.files("kvkeep_lab.tasks").joinpath("frankenstein.toml").read_text("utf-8"))[
        "questions"
    ]
)
"""Questions about the letters and chapters 1 to 7, in the order of the novel."""


class Novel(Task):
    """Length: how much of the novel is read, from its beginning."""

    name = "novel"
    about = "questions about the first chapters of Frankenstein, asked after the whole novel (about 92,000 tokens)"
    protocol = (
        "The novel is read in chunks within the budget, from its beginning up to a number of tokens, or to its end. "
        "Then each question is asked to a copy of the cache, so the method does not know it when it evicts entries. "
        "Only questions are asked whose answer has been read; all concern the letters and chapters 1 to 7. The first "
        "words of the answer are given. Found: a right answer stands in what is written greedily after them. ln p: the "
        "mean of the right answer's tokens, given one by one. Models know the novel from their training: the "
        "difference from prompt-newest, which has not read the answers, is what a method remembers."
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("loglik", "ln p a token", "higher", "number"),
        Metric("found", "found"),
    )
    relative = ("loglik", "found")
    axes = ("length",)

    length: list[Annotated[int, Field(ge=64)]] = Field(
        [100_000], min_length=1, description="tokens of the novel, or all"
    )
    samples: int = Field(30, ge=1, description="questions")
    new: int = Field(8, ge=1, description="tokens written")

    def sources(self, data: Path | None) -> list[Path]:
        return [source(data, FILE)]

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Choose ``samples`` questions at equal distances in the order of the novel, from question ``seed`` on."""
        novel, _ = shortened(tokenizer, read_text(str(sources[0])), int(point["length"]))
        known = [one for one in QUESTIONS if one.evidence in novel]
        if len(known) < self.samples:
            raise UsageError(
                f"The first {point['length']:,} tokens of '{sources[0]}' answer {len(known)} questions, and "
                f"{self.samples} are wanted; give a greater length, or fewer samples."
            )
        chosen = [known[(seed + len(known) * number // self.samples) % len(known)] for number in range(self.samples)]
        wordings = [self.wording(one) for one in chosen]
        prompts = [begun(tokenizer, f"{_START}{novel}\n\n{text}", None, lead, " ") for text, lead in wordings]
        shared, opening = (encode(tokenizer, question(part, None)) for part in (f"{_START}{novel}\n\n", _START))
        rights = [list(tokenizer(f" {one.answers[0]}", add_special_tokens=False).input_ids) for one in chosen]
        context = max(len(ids) + max(self.new, len(right)) for ids, right in zip(prompts, rights, strict=True))
        text, questions = read_once(prompts, shared, opening, context)
        return [
            Sample(
                ids,
                {
                    "text": text,
                    "right": right,
                    "answers": one.answers,
                    "depth": 100 * novel.index(one.evidence) / len(novel),
                },
            )
            for one, ids, right in zip(chosen, questions, rights, strict=True)
        ]

    def wording(self, one: NovelQuestion) -> tuple[str, str]:
        """Return the words of a question, and the first ones of its answer."""
        return one.question, one.lead

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        facts = sample.facts
        answer = subject.examine_after(facts["text"], sample.ids, facts["right"], self.new)
        found = any(contains(answer.text, right) for right in facts["answers"])
        return TaskOutcome({"loglik": fmean(answer.logs), "found": float(found)}, answer.cost, facts["depth"])


class NovelRephrased(Novel):
    """The same questions in words that the passages which answer them do not have."""

    name = "novel-rephrased"
    about = "the questions of 'novel' in other words than those of the passages that answer them"
    protocol = f"{Novel.protocol} A question and its lead have no word of five letters or more in common with the "
    protocol += "quoted words of the novel that answer it."

    def wording(self, one: NovelQuestion) -> tuple[str, str]:
        return one.rephrased, one.rephrased_lead
