"""Tokens, KL and perplexity compared with the full cache: the most sensitive measure, without labels."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from kvkeep_lab.cell import Point
from kvkeep_lab.reading import whole_bytes
from kvkeep_lab.subject import AnswerCost, Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome
from kvkeep_lab.tasks.rows import source
from kvkeep_lab.tasks.texts import joined, passage, text_files


class Match(Task):
    """Passages of texts, continued greedily. :mod:`kvkeep_lab.reference` describes the figures."""

    name = "match"
    about = "tokens, KL and perplexity against the full cache, on passages of any text"
    protocol = (
        "The unbounded cache continues each passage greedily. Free-running: the bounded cache writes by itself; match "
        "is the share of tokens that are the same, and KL, position by position, is of two texts once they parted. "
        "Teacher-forced: it is given the unbounded cache's tokens one by one, so KL, top-1 and perplexity are of one "
        "text."
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("kl", "KL, teacher-forced (nats)", "lower", "number", least=0.0),
        Metric("kl_free", "KL, free-running (nats)", "lower", "number", least=0.0),
        Metric("match", "match, free-running"),
        Metric("top1", "top-1, teacher-forced"),
        Metric("nll", "perplexity", "lower", "perplexity", least=0.0),
    )
    axes = ("length",)

    length: list[int] = Field([462], min_length=1, description="tokens read")
    new: int = Field(50, ge=2, description="tokens written")
    file: str | None = Field(None, description="text file in the data folder; by default the texts in haystack/")

    def setting(self) -> dict[str, Any]:
        """Return the fields that comparable cells share, without a ``file`` that is not given: cells of stores from
        before there was one stay comparable."""
        return {key: value for key, value in super().setting().items() if value is not None}

    def sources(self, data: Path | None) -> list[Path]:
        return text_files(data) if self.file is None else [source(data, self.file)]

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        text, tokens = joined(sources), int(point["length"])
        draws = (random.Random(f"{seed}/{number}") for number in range(self.samples))
        return [Sample(passage(tokenizer, text, tokens, draw)) for draw in draws]

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        row = subject.compare(sample.ids, self.new)
        assert row.kl_mean is not None and row.kl_free_mean is not None
        assert row.match is not None and row.top1 is not None and row.perplexity is not None
        scores = {"kl": row.kl_mean, "kl_free": row.kl_free_mean, "match": row.match, "top1": row.top1}
        scores["nll"] = math.log(row.perplexity)
        token_s = None if row.tokens_per_s is None else 1 / row.tokens_per_s
        full_bytes = whole_bytes(subject.loaded.model, len(sample.ids) + self.new)
        cost = AnswerCost(
            len(sample.ids), row.prefill_s or 0.0, token_s, row.memory, row.exactness, row.entries, full_bytes
        )
        return TaskOutcome(scores, cost)
