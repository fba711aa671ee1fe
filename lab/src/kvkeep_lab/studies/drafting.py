"""``drafts``: tokens a second of answers with and without drafts (:mod:`kvkeep.engine.drafts`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator, Field

from kvkeep.cache import KeepCache
from kvkeep.decode.answer_form import answers_to
from kvkeep.decode.cached_text import common_prefix
from kvkeep.decode.prompt import prompt_text
from kvkeep.engine.answer import Answer, Ask, Scheduler, end_ids
from kvkeep.engine.drafts import can_draft
from kvkeep.engine.grammar import Grammar, vocabulary
from kvkeep.engine.sampling import Sampling
from kvkeep.errors import UsageError, unknown
from kvkeep_lab.copying import KINDS, CopyingTask, tasks_of
from kvkeep_lab.drafts import without_drafts
from kvkeep_lab.partial import keeping
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import Flag, OwnMethod, Study, Trial, unique
from kvkeep_lab.tables import Table, fixed, percent, times


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise unknown("task", kind, KINDS)
    return kind


@dataclass(frozen=True)
class TimedAnswer:
    """An answer in one way."""

    seconds: float
    """From its first token to its last one."""
    passes: int
    """Passes of the model in that time."""
    drafted: int
    accepted: int


@dataclass(frozen=True)
class DraftedAnswer:
    """An answer without drafts, and with them."""

    kind: str
    number: int
    tokens: int
    same: bool
    """Whether both have the same tokens."""
    without: TimedAnswer
    """Without drafts."""
    drafts: TimedAnswer
    """With drafts."""


@dataclass(frozen=True)
class DraftedAnswers:
    """All answers."""

    answers: list[DraftedAnswer]


class Drafting(Study):
    """What drafts gain."""

    name = "drafts"
    about = "time answers with and without drafts: a file with one name changed, a quotation, edits by calls, a story"
    protocol = (
        "Each answer is generated twice, greedily: without drafts and with them, in turns. What both read of the "
        "prompt is not timed. Tokens a second: from the first token to the last one. The files are those of Python's "
        "standard library. An edit is a call of a tool with the lines that change, as they are and as they shall be."
    )
    found = DraftedAnswers
    weights: ClassVar[str] = "auto"

    tasks: Annotated[list[Annotated[str, AfterValidator(_known)]], unique] = Field(
        [*KINDS], min_length=1, description=f"kinds of tasks: {', '.join(KINDS)}"
    )
    edits: int = Field(50, ge=1, description="number of edits")
    rounds: int = Field(3, ge=1, description="how often each other task is answered in both ways")
    new: Annotated[int, Flag("--max-tokens", "-n")] = Field(300, ge=2, description="maximum tokens of an answer")
    method: Annotated[OwnMethod, Flag("--method")] = Field("full", description="cache method, an exact one")
    seed: int = Field(1, ge=0, description="number that determines the edits")

    def check(self, files: Sequence[Path]) -> None:
        if "edits" in self.tasks and find_spec("llguidance") is None:
            raise UsageError("edits need the package 'llguidance', which is missing: pip install 'kvkeep[serve]'.")
        self.all_tasks()

    def all_tasks(self) -> list[CopyingTask]:
        """Return the tasks, in the order in which they are answered."""
        made = {kind: tasks_of(kind, self.edits, self.seed) for kind in self.tasks}
        return [one for kind, tasks in made.items() for one in tasks * (1 if kind == "edits" else self.rounds)]

    def measure(self, trial: Trial) -> DraftedAnswers:
        cache = KeepCache(trial.model, self.method)
        if not can_draft(cache):
            raise UsageError(
                f"Answers of '{self.method}' have no drafts with this model; use an exact method, and packed weights."
            )
        writer, found, tasks = _Writer(trial, cache, self.new), DraftedAnswers([]), self.all_tasks()
        with keeping(found, found.answers):
            for number, task in enumerate(tasks):
                trial.progress(f"{task.kind}, answer {number + 1}", number, len(tasks))
                ask = writer.ask(task)
                ways = [writer.write(ask, drafts=bool((number + way) % 2)) for way in range(2)]
                (one, without), (other, drafted) = ways if number % 2 == 0 else ways[::-1]
                answer = DraftedAnswer(task.kind, number, len(one), one == other, without, drafted)
                found.answers.append(answer)
                trial.say(_line(answer))
        return found

    def problem(self, found: DraftedAnswers) -> str | None:
        wrong = [one.number for one in found.answers if not one.same]
        return f"{len(wrong)} answers differ with drafts, first the one with number {wrong[0]}." if wrong else None

    def tables(self, found: DraftedAnswers) -> list[Table]:
        headings = [
            "task",
            "answers",
            "tokens",
            "tokens/s without",
            "with",
            "",
            "median",
            "tokens a pass",
            "drafts that were right",
        ]
        table = Table("Drafts", headings, notes=["Ratios: of all tokens, and the median of answers."])
        for kind in each(found.answers, "kind"):
            mine = where(found.answers, kind=kind)
            steps = sum(one.tokens - 1 for one in mine)
            rates = [
                steps / max(1e-9, sum(way(one).seconds for one in mine))
                for way in map(attrgetter, ("without", "drafts"))
            ]
            ratios = [one.without.seconds / max(1e-9, one.drafts.seconds) for one in mine]
            drafted = sum(one.drafts.drafted for one in mine)
            right = sum(one.drafts.accepted for one in mine) / drafted if drafted else None
            passes = sum(one.drafts.passes for one in mine)
            cells = [f"{len(mine)}", f"{sum(one.tokens for one in mine):,}", *(fixed(rate, 1) for rate in rates)]
            cells += [times(rates[1] / rates[0]), times(median(ratios)), fixed(steps / max(1, passes)), percent(right)]
            table.rows.append([kind, *cells])
        return [table]


def _line(one: DraftedAnswer) -> str:
    ratio = one.without.seconds / max(1e-9, one.drafts.seconds)
    seconds = f"{one.without.seconds:.2f} s without drafts, {one.drafts.seconds:.2f} s with them"
    return f"{one.kind} {one.number + 1}: {one.tokens} tokens, {seconds}, {ratio:.2f} ×"


class _Writer:
    """Writes answers in one cache, which keeps what the next prompt begins with."""

    def __init__(self, trial: Trial, cache: KeepCache, new: int) -> None:
        self._model, self._tokenizer, self._cache, self._new = trial.model, trial.tokenizer, cache, new
        self._scheduler = Scheduler(trial.model)  # it knows the prices of passes
        self._ids: list[int] = []  # of the tokens in the cache

    def ask(self, task: CopyingTask) -> Ask:
        """Return the request for the answer to a task."""
        text = prompt_text(self._tokenizer, task.messages, tools=task.tools)
        ids, grammar = text.ids(self._tokenizer), None
        if task.calls.tools:
            answers = answers_to(self._tokenizer, ids)
            known = vocabulary(self._tokenizer, self._cache.geometry.vocab_size, end_ids(self._model))
            grammar = Grammar(known, answers.form(task.calls, known))
        return Ask(ids, self._new, Sampling(temperature=0, grammar=grammar))

    @torch.no_grad()
    def write(self, ask: Ask, drafts: bool) -> tuple[list[int], TimedAnswer]:
        """Return the tokens of an answer, and its times."""
        count = min(common_prefix(self._ids, ask.prompt), len(ask.prompt) - 1)
        self._cache.crop(count - self._cache.get_seq_length())
        answer, passes = Answer(ask, self._cache, self._tokenizer, end_ids(self._model), None), 0
        with without_drafts(self._model, unless=drafts):
            scheduled, complete = self._scheduler.add(answer), False
            try:
                while not complete:
                    passes += bool(answer.tokens)
                    for result in self._scheduler.step():
                        complete = scheduled.give(result.logits)
            finally:
                self._scheduler.remove(scheduled)
        self._ids = [*ask.prompt, *answer.tokens][: self._cache.get_seq_length()]
        return answer.tokens, TimedAnswer(answer.last_at - answer.first_at, passes, answer.drafted, answer.accepted)
