"""Summaries, scored by ROUGE against reference summaries by people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field

from kvkeep.decode.prompt import encode, question
from kvkeep.errors import UsageError
from kvkeep_lab.cell import Point
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome
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
        "the budget; the summary is written greedily. ROUGE-1, -2 and -L: F1 with stemming (rouge-score), times 100. "
        "Floors, in the row of the full cache: ROUGE-1 of the article's beginning of a mean summary's length, "
        "and of what the model writes without the article."
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("rouge1", "ROUGE-1"),
        Metric("rouge2", "ROUGE-2"),
        Metric("rougeL", "ROUGE-L"),
        Metric("lead", "ROUGE-1 of the first words"),
        Metric("blind", "ROUGE-1 without the article"),
    )
    relative = ("rouge1", "rougeL")

    file: str = Field("xsum_0shot_first200.jsonl", description="the file in the data folder")
    samples: int = Field(8, ge=1, description="articles of each cell")
    least: int = Field(0, ge=0, description="tokens of a prompt; articles with fewer are passed over")
    new: int = Field(64, ge=1, description="the most tokens of a summary")

    def sources(self, data: Path | None) -> list[Path]:
        """Return the file in ``data``, or without ``data`` that of :data:`HUBS`."""
        found = source(data, self.file, HUBS.get(self.file))
        articles(found)
        return [found]

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Return articles of the file: the first ones for seed 0, else a random draw."""
        read = articles(sources[0])
        found = [(ids, one) for one in read if len(ids := _prompt(tokenizer, one.prompt)) >= self.least]
        there = f"'{sources[0]}' has {len(found)} articles of {self.least} tokens or more"
        words = round(fmean(len(one.summary.split()) for one in read)) if read else 0
        samples = []
        for ids, one in drawn(found, self.samples, seed, there):
            blind = _prompt(tokenizer, one.prompt.replace(one.text, "").strip() or FORMS[-1].instruction)
            lead = " ".join(one.text.split()[:words])
            samples.append(Sample(ids, {"summary": one.summary, "lead": lead, "blind": blind}))
        return samples

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        answer, expected = subject.write(sample.ids, self.new, shared=True), sample.facts["summary"]
        scores = rouge(expected, answer.text)
        if subject.method == "full":
            floors = {"lead": sample.facts["lead"], "blind": subject.written_once(sample.facts["blind"], self.new)}
            scores |= {name: rouge(expected, text)["rouge1"] for name, text in floors.items()}
        return TaskOutcome(scores, answer.cost)


def _prompt(tokenizer: Any, text: str) -> list[int]:
    return encode(tokenizer, question(text.removeprefix("###").strip(), None))


@dataclass(frozen=True)
class Article:
    """An article of a data set, with its summary."""

    text: str
    prompt: str
    """The article with the instruction."""
    summary: str


def articles(path: Path) -> list[Article]:
    """Return the article of every row. Raises UsageError for a row of an unknown form."""
    found = []
    for number, row in enumerate(rows(path), start=1):
        form = next((form for form in FORMS if _text(row, form.article) and _text(row, form.summary)), None)
        if form is None:
            known = ", ".join(f"'{form.article}' and '{form.summary}'" for form in FORMS)
            raise UsageError(f"Row {number} of '{path}' is not an article with a summary; such have {known}.")
        given = row[form.article]
        prompt = "\n\n".join(part for part in (given, form.instruction) if part)
        text = _HELM.fullmatch(given)
        found.append(Article(given.strip() if text is None else text[1], prompt, row[form.summary]))
    return found


def _text(row: dict[str, Any], field: str) -> bool:
    return isinstance(row.get(field), str) and bool(row[field].strip())


def rouge(expected: str, text: str) -> dict[str, float]:
    """Return the F1 of ROUGE-1, -2 and -L of stemmed words, from 0 to 1."""
    scores = _scorer().score(expected, text)
    return {kind: float(scores[kind].fmeasure) for kind in _KINDS}


_HELM = re.compile(r"###\s*Article:\s*(.*?)\s*\n\nSummarize[^\n]*\n?", re.DOTALL)
"""An article in HELM's files."""


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(_KINDS), use_stemmer=True)
