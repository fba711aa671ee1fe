"""Summaries, scored by ROUGE against reference summaries by people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from kvkeep.decode.prompt import encode, question
from kvkeep.errors import UsageError
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.base import Metric, Point, Sample, Task, TaskOutcome
from kvkeep_lab.tasks.rows import Hub, drawn, rows, source

_KINDS = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True)
class SummaryForm:
    """The fields of article and summary in a data set."""

    article: str
    summary: str
    instruction: str = ""
    """The request after the article; "" if the article contains it."""


FORMS = (
    SummaryForm("article", "summary_gt"),
    SummaryForm("article", "highlights", "Summarize the above article in 3 sentences."),
    SummaryForm("document", "summary", "Summarize the above article in 1 sentence."),
)
"""The forms of HELM's files, and of CNN/DM and XSum on the hub with HELM's instructions."""

HUBS = {
    "cnn_dm.jsonl": Hub("abisee/cnn_dailymail", "3.0.0", rows=500),
    "xsum.jsonl": Hub("EdinburghNLP/xsum", rows=500),
}
"""Data sets of the hub that replace a missing data folder, by the name of the file."""


class Summary(Task):
    """Articles and summaries: JSON lines of one of the :data:`FORMS`."""

    name = "summary"
    about = "summaries of articles (XSum, CNN/DM), by ROUGE"
    protocol = (
        "Each article with HELM's instruction is one user's message in the model's chat template, read in chunks under "
        "the budget; the summary is written greedily. ROUGE-1, -2 and -L: F1 with stemming (rouge-score), times 100."
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("rouge1", "ROUGE-1"),
        Metric("rouge2", "ROUGE-2"),
        Metric("rougeL", "ROUGE-L"),
    )
    relative = ("rouge1", "rougeL")

    file: str = Field("xsum_0shot_first200.jsonl", description="the file in the data folder")
    samples: int = Field(8, ge=1, description="articles of each cell")
    least: int = Field(0, ge=0, description="tokens of a prompt; articles with fewer are passed over")
    new: int = Field(64, ge=1, description="the most tokens of a summary")

    def sources(self, data: Path | None) -> list[Path]:
        """Return the file in ``data``, or without ``data`` that of :data:`HUBS`."""
        return [source(data, self.file, HUBS.get(self.file))]

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Return articles of the file: the first ones for seed 0, else a random draw."""
        found = [
            Sample(ids, {"summary": summary})
            for article, summary in articles(sources[0])
            if len(ids := _prompt(tokenizer, article)) >= self.least
        ]
        there = f"'{sources[0]}' has {len(found)} articles of {self.least} tokens or more"
        return drawn(found, self.samples, seed, there)

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        answer = subject.write(sample.ids, self.new)
        return TaskOutcome(rouge(sample.facts["summary"], answer.text), answer.cost)


def _prompt(tokenizer: Any, article: str) -> list[int]:
    return encode(tokenizer, question(article.removeprefix("###").strip(), None))


def articles(path: Path) -> list[tuple[str, str]]:
    """Return (article with its instruction, summary) of every row. Raises UsageError for a row of an unknown form."""
    found = []
    for number, row in enumerate(rows(path), start=1):
        form = next((form for form in FORMS if form.article in row and form.summary in row), None)
        if form is None:
            known = ", ".join(f"'{form.article}' and '{form.summary}'" for form in FORMS)
            raise UsageError(f"Row {number} of '{path}' is not an article with a summary; such have {known}.")
        article = "\n\n".join(part for part in (str(row[form.article]), form.instruction) if part)
        found.append((article, str(row[form.summary])))
    return found


def rouge(expected: str, text: str) -> dict[str, float]:
    """Return the F1 of ROUGE-1, -2 and -L of stemmed words, from 0 to 1."""
    scores = _scorer().score(expected, text)
    return {kind: float(scores[kind].fmeasure) for kind in _KINDS}


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(_KINDS), use_stemmer=True)
