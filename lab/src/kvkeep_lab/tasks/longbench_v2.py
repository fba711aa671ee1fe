"""LongBench v2: questions with four choices about texts of 8 thousand to 2 million words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from kvkeep.decode.prompt import encode
from kvkeep_lab.cell import Point
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome
from kvkeep_lab.tasks.longbench import cut
from kvkeep_lab.tasks.rows import Hub, drawn, rows, source

PROMPT = resources.files("kvkeep_lab.tasks").joinpath("longbench_v2.txt").read_text("utf-8")
"""The authors' prompt, unchanged (prompts/0shot.txt of THUDM/LongBench, MIT)."""

_BRACKETED = re.compile(r"The correct answer is \(([A-D])\)")
_BARE = re.compile(r"The correct answer is ([A-D])")
_PLACES = {
    "$DOC$": "context",
    "$Q$": "question",
    "$C_A$": "choice_A",
    "$C_B$": "choice_B",
    "$C_C$": "choice_C",
    "$C_D$": "choice_D",
}


class LongBenchV2(Task):
    """Rows of the official release: ``data.json``, a list of ``question``, ``choice_A`` to ``choice_D``, ``answer``,
    ``context``, ``difficulty`` and ``length``."""

    name = "longbench-v2"
    about = "LongBench v2: four choices, by difficulty and length"
    protocol = (
        "The authors' prompt without reasoning, cut in the middle to max_length tokens, in the model's chat template, "
        'read in chunks under the budget and answered greedily. The choice is the letter after "The correct answer '
        'is"; without one the answer is wrong. Guessing gives 25 %.'
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("overall", "overall"),
        *(Metric(part, part) for part in ("easy", "hard", "short", "medium", "long")),
        Metric("answered", "answered"),
    )
    relative = ("overall",)

    samples: int = Field(20, ge=1, description="questions")
    max_length: int = Field(7500, ge=2, description="tokens that longer prompts are cut to")
    new: int = Field(128, ge=1, description="the most tokens of an answer")

    def sources(self, data: Path | None) -> list[Path]:
        return [source(data, "data.json", Hub("THUDM/LongBench-v2", split="train"))]

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Return questions: the first ones for seed 0, else a random draw."""
        found = rows(sources[0], *_PLACES.values(), "answer", "difficulty", "length")
        taken = drawn(found, self.samples, seed, f"'{sources[0]}' has {len(found)} questions")
        return [self._sample(tokenizer, row) for row in taken]

    def _sample(self, tokenizer: Any, row: dict[str, Any]) -> Sample:
        text = cut(tokenizer, filled(row), self.max_length)
        facts = {"answer": row["answer"], "groups": [row["difficulty"], row["length"]]}
        return Sample(encode(tokenizer, [{"role": "user", "content": text}]), facts)

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        answer = subject.write(sample.ids, self.new, lambda text: bool(_BRACKETED.search(_plain(text))))
        choice = chosen(answer.text)
        right = float(choice == sample.facts["answer"])
        scores = {"overall": right, **dict.fromkeys(sample.facts["groups"], right)}
        return TaskOutcome({**scores, "answered": float(choice is not None)}, answer.cost)


def filled(row: dict[str, Any]) -> str:
    """Return the prompt of a row. Each placeholder is filled once, so that a text may contain placeholders."""
    return re.sub("|".join(map(re.escape, _PLACES)), lambda found: row[_PLACES[found[0]]].strip(), PROMPT)


def chosen(text: str) -> str | None:
    """Return the letter that an answer chooses, if it has the requested form."""
    found = _BRACKETED.search(_plain(text)) or _BARE.search(_plain(text))
    return found[1] if found else None


def _plain(text: str) -> str:
    return text.replace("*", "")
