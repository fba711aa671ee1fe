"""Several instructions at once, each of which a program can verify, as in IFEval (Zhou et al., arXiv:2311.07911).

A bounded cache may evict the entries of an instruction, so that the answer ignores it (arXiv:2510.00231). The
instructions are the system prompt; a text follows, and the request to write about it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from kvkeep.decode.instructions import instruction_tokens
from kvkeep.decode.prompt import encode
from kvkeep_lab.cell import Point
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome
from kvkeep_lab.tasks.texts import joined, passage_text, text_files

HEAD = "Follow all of these instructions in your answer:"
TEXT = "Here is a text.\n\n{text}\n\nThe text ends here. Write a short review of it. Follow all instructions."
_WORDS = ("river", "winter", "ladder", "copper", "garden", "market", "signal", "harbor", "pepper", "candle")
_BEGINNINGS = ("In short:", "Dear reader:", "My review:", "To begin with:")
_ENDINGS = ("Thank you for reading.", "Goodbye for now.", "Any further questions?", "See you next time.")


@dataclass(frozen=True)
class Instruction:
    """A kind of instruction."""

    text: str
    """The sentence in the prompt; ``{value}`` is replaced by a value."""
    values: Sequence[Any]
    """The values of which a sample draws one."""
    follows: Callable[[str, Any], bool]
    """Returns whether an answer follows it with a value."""


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


KINDS = {
    "begin": Instruction(
        "Begin your answer with the exact words: {value}",
        _BEGINNINGS,
        lambda text, value: text.strip().casefold().startswith(value.casefold()),
    ),
    "end": Instruction(
        "End your answer with the exact words: {value}",
        _ENDINGS,
        lambda text, value: text.strip().casefold().endswith(value.casefold()),
    ),
    "include": Instruction("Use the word '{value}' in your answer.", _WORDS, lambda text, value: value in _words(text)),
    "case": Instruction(
        "Write your whole answer in capital letters only.",
        ("",),
        lambda text, value: text == text.upper() != text.lower(),
    ),
    "bullets": Instruction(
        "Your answer must have exactly {value} bullet points, in lines that begin with '* '.",
        (2, 3, 4),
        lambda text, value: len(re.findall(r"^\s*\* ", text, re.MULTILINE)) == value,
    ),
    "placeholders": Instruction(
        "Your answer must have at least {value} placeholders in square brackets, such as [name].",
        (1, 2, 3),
        lambda text, value: len(re.findall(r"\[[^\[\]]+\]", text)) >= value,
    ),
    "title": Instruction(
        "Give your answer a title in double angular brackets, such as <<title>>.",
        ("",),
        lambda text, value: re.search(r"<<[^<>\n]+>>", text) is not None,
    ),
    "postscript": Instruction(
        "Add a postscript, in a line that begins with P.S.",
        ("",),
        lambda text, value: re.search(r"^\W*p\.s\.", text.casefold(), re.MULTILINE) is not None,
    ),
    "number": Instruction(
        "Use the number {value} in your answer.", (17, 42, 86, 365), lambda text, value: str(value) in _words(text)
    ),
    "highlight": Instruction(
        "Highlight at least {value} parts of your answer with asterisks, such as *this part*.",
        (1, 2),
        lambda text, value: len(re.findall(r"(?<![*\w])\*{1,2}[^*\s][^*\n]*\*", text)) >= value,
    ),
}
"""The kinds of instructions. Each asks for something, because an answer without sense lacks what is forbidden, too.
Any of them can be followed together: exact words may be in other letters."""


class Instructions(Task):
    """Five instructions, or another number, in the system prompt."""

    name = "instructions"
    about = "how many of several verifiable instructions an answer follows, after a text"
    protocol = (
        "The system prompt lists instructions of different kinds, drawn at random; the user's message is a text with a "
        "request to write a short review of it. The prompt is read in chunks under the budget, and the answer is "
        "greedy. A program verifies each instruction, as IFEval does. "
        "Methods with '+pinned' never evict the entries of the system prompt."
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("followed", "instructions followed"),
        Metric("all", "all of them followed"),
        Metric("first", "the first one followed"),
        Metric("last", "the last one followed"),
    )
    relative = ("followed", "all")

    samples: int = Field(50, ge=1, description="number of prompts in each cell")
    count: int = Field(5, ge=1, le=len(KINDS), description="instructions of a prompt")
    text: int = Field(512, ge=1, description="tokens of the text")
    new: int = Field(160, ge=1, description="the most tokens of an answer")

    def sources(self, data: Path | None) -> list[Path]:
        return text_files(data)

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Draw kinds, values and a text for each sample."""
        text, made = joined(sources), []
        for number in range(self.samples):
            draw = random.Random(f"{seed}/{number}")
            chosen = [(kind, draw.choice(KINDS[kind].values)) for kind in draw.sample([*KINDS], self.count)]
            lines = [
                f"{place}. {KINDS[kind].text.format(value=value)}" for place, (kind, value) in enumerate(chosen, 1)
            ]
            passage = passage_text(tokenizer, text, self.text, draw)
            messages = [
                {"role": "system", "content": "\n".join([HEAD, *lines])},
                {"role": "user", "content": TEXT.format(text=passage)},
            ]
            ids = encode(tokenizer, messages)
            made.append(Sample(ids, {"chosen": chosen}, instruction_tokens(tokenizer, ids, messages)))
        return made

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        return next(self.outcomes(subject, [sample]))

    def outcomes(self, subject: Subject, samples: Sequence[Sample]) -> Iterator[TaskOutcome]:
        """Measure ``samples``; their answers share passes."""
        pinned = [sample.instructions for sample in samples]
        answers = subject.write_each([sample.ids for sample in samples], self.new, pinned)
        for sample, answer in zip(samples, answers, strict=True):
            found = followed(answer.text, sample.facts["chosen"])
            scores = {"followed": sum(found) / len(found), "all": float(all(found))}
            yield TaskOutcome(scores | {"first": float(found[0]), "last": float(found[-1])}, answer.cost)


def followed(text: str, chosen: Sequence[tuple[str, Any]]) -> list[bool]:
    """Return which instructions an answer follows. chosen: the kind and the value of each."""
    return [KINDS[kind].follows(text, value) for kind, value in chosen]
