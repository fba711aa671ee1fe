"""LongBench: sixteen English tasks on long texts, with its authors' prompts and scores.

lm-evaluation-harness (0.4.13) has these tasks with another protocol. It truncates long prompts at the start instead of
the middle. It applies the chat template to all prompts or to none. It needs the hub and the packages jieba, fuzzywuzzy
and rouge. Its LongBench v2 compares the likelihoods of four letters, while the authors' protocol generates an answer.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvkeep.decode.prompt import encode
from kvkeep.errors import UsageError
from kvkeep_lab.cell import Point
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome, among
from kvkeep_lab.tasks.longbench_scores import JUDGES
from kvkeep_lab.tasks.rows import Hub, drawn, rows, source

HUB = "Xnhyacinth/LongBench"
"""Repository with the rows of the authors' repository, which needs a script that ``datasets`` does not run.
lm-evaluation-harness uses the same repository."""

GROUPS = {
    "single_doc": "Single-Doc",
    "multi_doc": "Multi-Doc",
    "summary": "Sum",
    "few_shot": "Few-shot",
    "synthetic": "Synthetic",
    "code": "Code",
}


@dataclass(frozen=True)
class Setting:
    """Prompt and score of a data set; see ``longbench.toml``."""

    group: str
    judge: str
    new: int
    prompt: str
    chat: bool = True
    first_line: bool = False

    def line(self, text: str) -> str:
        """Return the scored part of an answer."""
        return text.lstrip("\n").split("\n")[0] if self.first_line else text

    def ended(self, text: str) -> bool:
        """Return whether the continuation of an answer would not be scored."""
        return self.first_line and "\n" in text.lstrip("\n")

    def score(self, text: str, answers: Sequence[str], classes: Sequence[str]) -> float:
        """Return the maximum score over the right answers."""
        judge, line = JUDGES[self.judge], self.line(text)
        return max((judge(line, right, classes) for right in answers), default=0.0)


SETTINGS: dict[str, Setting] = {
    name: Setting(**given)
    for name, given in tomllib.loads(
        resources.files("kvkeep_lab.tasks").joinpath("longbench.toml").read_text("utf-8")
    ).items()
}
"""The data sets by name, in the order of the paper's tables."""

DataSet = Annotated[str, among("data set of LongBench", SETTINGS)]


class LongBench(Task):
    """Rows of the official release: ``DATASET.jsonl``, with ``input``, ``context``, ``answers`` and ``all_classes``."""

    name = "longbench"
    about = "LongBench's English tasks: documents, summaries, few-shot, synthetic, code"
    protocol = (
        "The authors' prompts, cut in the middle to max_length tokens, in the model's chat template (but for trec, "
        "triviaqa, samsum, lcc and repobench-p), read in chunks under the budget and answered greedily. Scores: F1 of "
        "words, ROUGE-L (as the package rouge has it), accuracy, or the likeness of a line of code, times 100; each "
        "group's is of its samples."
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("score", "score"),
        *(Metric(name, label) for name, label in GROUPS.items()),
    )
    relative = ("score",)
    axes = ("dataset",)

    dataset: list[DataSet] = Field(list(SETTINGS), min_length=1, description="which of the sixteen")
    samples: int = Field(20, ge=1, description="rows of each data set")
    max_length: int = Field(7500, ge=2, description="tokens that longer prompts are cut to")

    def sources(self, data: Path | None) -> list[Path]:
        return [source(data, f"{name}.jsonl", Hub(HUB, name)) for name in self.dataset]

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Return rows of one data set: the first ones for seed 0, else a random draw."""
        name = str(point["dataset"])
        path = sources[self.dataset.index(name)]
        found = rows(path, "context", "answers", "all_classes")
        if other := {row.get("dataset", name) for row in found} - {name}:
            raise UsageError(f"'{path}' holds rows of {other.pop()}, not of {name}; give the folder of all (--data).")
        taken = drawn(found, self.samples, seed, f"'{path}' has {len(found)} rows")
        return [self._sample(tokenizer, name, row) for row in taken]

    def _sample(self, tokenizer: Any, name: str, row: dict[str, Any]) -> Sample:
        setting = SETTINGS[name]
        if (question := row.get("input", row.get("question"))) is None:  # names in the release and on the hub
            raise UsageError(f"A row of {name} has no field 'input'; take the official release (--data).")
        text = cut(tokenizer, setting.prompt.format(input=question, context=row["context"]), self.max_length)
        ids = encode(tokenizer, [{"role": "user", "content": text}], raw=not setting.chat)
        return Sample(ids, {"dataset": name, "answers": row["answers"], "classes": row["all_classes"] or []})

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        setting = SETTINGS[sample.facts["dataset"]]
        answer = subject.write(sample.ids, setting.new, setting.ended if setting.first_line else None)
        score = setting.score(answer.text, sample.facts["answers"], sample.facts["classes"])
        return TaskOutcome({"score": score, setting.group: score}, answer.cost)


def cut(tokenizer: Any, text: str, limit: int) -> str:
    """Return ``text`` without its middle if it is longer than ``limit`` tokens; half of them come from each end."""
    ids = tokenizer(text, verbose=False).input_ids
    if len(ids) <= limit:
        return text
    half = limit // 2
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
