"""RULER as a task of the lab: questions of the requested length, and its string match."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvkeep.errors import UsageError
from kvkeep_lab.cell import Point
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome, among
from kvkeep_lab.tasks.rows import source
from kvkeep_lab.tasks.ruler.families import ESSAYS, FAMILIES, GENERATED
from kvkeep_lab.tasks.ruler.generated import RulerQuestion
from kvkeep_lab.tasks.texts import begun, text_files

FamilyName = Annotated[str, among("family of RULER", FAMILIES)]


class Ruler(Task):
    """Length × family. A length includes the prompt and the maximum tokens of the answer, as in RULER."""

    name = "ruler"
    about = "RULER: needles, variables, word counts and questions, by family and length"
    protocol = (
        "RULER's prompts, the largest of each family that its length has room for, question last, read in chunks under "
        "the budget: while the text is read, the question is not known yet. The answer's first words are given, as "
        "RULER gives them. String match: the share of the answers that stand in what is written greedily after them "
        "(qa: whether one does), case aside. ln p: the mean of the right answer's tokens, given one by one."
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("match", "string match"),
        Metric("loglik", "ln p a token", "higher", "number"),
    )
    relative = ("match", "loglik")
    mapped = ("match", "loglik")
    axes = ("length", "family")

    length: list[Annotated[int, Field(ge=128)]] = Field([1024], min_length=1, description="tokens, answer included")
    family: list[FamilyName] = Field(GENERATED, min_length=1, description=", ".join(FAMILIES))
    new: int = Field(128, ge=1, description="the most tokens written; RULER's own number where that is less")

    def sources(self, data: Path | None) -> list[Path]:
        """Return the files that the families need: the essays, SQuAD (squad.json) and HotpotQA (hotpotqa.json)."""
        read = dict.fromkeys(FAMILIES[name].reads for name in self.family)
        folder = data.parent if data is not None and data.is_file() else data
        essays = text_files(folder) if ESSAYS in read else []
        return essays + [source(folder, file) for file in read if file not in ("", ESSAYS)]

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        length, name = int(point["length"]), str(point["family"])
        family = FAMILIES[name]
        loaded = family.load([path for path in sources if _kind(path) == family.reads])
        keys = (f"{seed}/{name}/{number}" for number in range(self.samples))
        return [self._sample(tokenizer, name, loaded, length, key) for key in keys]

    def _sample(self, tokenizer: Any, name: str, loaded: Any, length: int, key: str) -> Sample:
        family = FAMILIES[name]
        new = min(self.new, family.new)

        def ask(size: int) -> RulerQuestion:
            return family.ask(loaded, random.Random(key), size, length)

        def tokens(size: int) -> int:
            return len(_prompt(tokenizer, ask(size)))

        size = largest(tokens, length - new, family.least, family.greatest(loaded))
        if size is None:
            raise UsageError(f"A length of {length} tokens has no room for RULER's {name}; give a greater one.")
        question = ask(size)
        right = list(tokenizer(f" {question.right}", add_special_tokens=False).input_ids)
        facts = {"answers": question.answers, "some": family.some, "right": right, "new": new}
        return Sample(_prompt(tokenizer, question), facts)

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        facts = sample.facts
        answer = subject.examine(sample.ids, facts["right"], facts["new"])
        matched = string_match(answer.text, facts["answers"], some=facts["some"])
        return TaskOutcome({"match": matched, "loglik": fmean(answer.logs)}, answer.cost)


def string_match(text: str, answers: Sequence[str], *, some: bool) -> float:
    """Return RULER's ``string_match_all`` of one answer: the share of ``answers`` in ``text``. With ``some``, return
    its ``string_match_part``: 1 if at least one of them is in ``text``, else 0."""
    written = re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip().lower()
    found = [answer.lower() in written for answer in answers]
    return float(any(found)) if some else fmean(found)


def largest(tokens: Callable[[int], int], limit: int, least: int, greatest: int | None) -> int | None:
    """Return the largest size from ``least`` to ``greatest`` with at most ``limit`` tokens; None if ``least`` has too
    many. It assumes that ``tokens`` grows with the size."""
    if tokens(least) > limit:
        return None
    fits, over = least, None if greatest is None else greatest + 1
    while over is None or over - fits > 1:
        size = 2 * fits if over is None else (fits + over) // 2
        if tokens(size) <= limit:
            fits = size
        else:
            over = size
    return fits


def _kind(path: Path) -> str:
    return ESSAYS if path.suffix == ".txt" else path.name


def _prompt(tokenizer: Any, task: RulerQuestion) -> list[int]:
    return begun(tokenizer, task.text, None, task.lead, " ")
