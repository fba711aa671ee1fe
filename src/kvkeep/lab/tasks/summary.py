"""Summaries, judged by ROUGE against the ones people wrote."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from kvkeep.decode.prompt import encode, question, read_text
from kvkeep.errors import UsageError
from kvkeep.lab.subject import Subject
from kvkeep.lab.tasks.base import Metric, Outcome, Point, Sample, Task

_KINDS = ("rouge1", "rouge2", "rougeL")


class Summary(Task):
    """Articles with their instruction, as HELM has them: JSON lines with ``article`` and ``summary_gt``."""

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
    packages: ClassVar[dict[str, str]] = {"rouge_score": "rouge-score"}

    file: str = Field("xsum_0shot_first200.jsonl", description="the file in the data folder")
    samples: int = Field(8, ge=1, description="articles of each cell")
    least: int = Field(0, ge=0, description="tokens of a prompt; articles with fewer are passed over")
    new: int = Field(64, ge=1, description="the most tokens of a summary")

    def sources(self, data: Path | None) -> list[Path]:
        """Return the file."""
        if data is None:
            raise UsageError(f"Task 'summary' reads articles: give --data FOLDER, with {self.file} in it.")
        path = data if data.is_file() else data / self.file
        if not path.is_file():
            raise UsageError(f"There is no file '{path}'; give the folder that holds {self.file} (--data).")
        return [path]

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Take articles from the file; seed 0 takes the first ones, any other draws."""
        rows = [
            Sample(ids, {"summary": summary})
            for article, summary in articles(sources[0])
            if len(ids := _prompt(tokenizer, article)) >= self.least
        ]
        if len(rows) < self.samples:
            count = f"{len(rows)} articles of {self.least} tokens or more"
            raise UsageError(f"'{sources[0]}' has {count}, and {self.samples} are wanted.")
        return rows[: self.samples] if seed == 0 else random.Random(seed).sample(rows, self.samples)

    def measure(self, subject: Subject, sample: Sample) -> Outcome:
        """Let the summary be written, and compare it."""
        answer = subject.write(sample.ids, self.new)
        return Outcome(rouge(sample.facts["summary"], answer.text), answer.cost)


def _prompt(tokenizer: Any, article: str) -> list[int]:
    return encode(tokenizer, question(article.removeprefix("###").strip(), None))


def articles(path: Path) -> list[tuple[str, str]]:
    """Return (article with its instruction, summary) of every line; raises UsageError for a line that has none."""
    found = []
    for number, line in enumerate(read_text(str(path)).splitlines(), start=1):
        try:
            row = json.loads(line)
            found.append((str(row["article"]), str(row["summary_gt"])))
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"Line {number} of '{path}' is not an article: a JSON object with 'article' and 'summary_gt' is wanted."
            ) from None
    return found


def rouge(expected: str, text: str) -> dict[str, float]:
    """Return the F1 of ROUGE-1, -2 and -L, from 0 to 1, words stemmed."""
    scores = _scorer().score(expected, text)
    return {kind: float(scores[kind].fmeasure) for kind in _KINDS}


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(_KINDS), use_stemmer=True)
