"""Perplexity of any text; each token is predicted from the bounded cache of the preceding tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from kvkeep.decode.texts import read_text
from kvkeep.errors import UsageError
from kvkeep_lab.cell import Point
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome
from kvkeep_lab.tasks.rows import drawn, source


class Perplexity(Task):
    """Windows of one text. Each sample is a window."""

    name = "perplexity"
    about = "perplexity of any text, token by token through the bounded cache"
    protocol = (
        "The text is cut into windows, each a stride after the one before, and each window is read by a cache of its "
        "own: all before its last stride of tokens as a prompt, those one step at a time, as decoding does. They are "
        "scored, each once; without anything before it, a window's first token is not. A token attends to what the "
        "cache holds of earlier steps, and to those before it in its own step. Perplexity: exp of the mean of -ln p "
        "over the tokens of all windows."
    )
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("nll", "perplexity", "lower", "perplexity"),)
    relative = ("nll",)
    axes = ("length",)

    file: str = Field("wikitext2_test.txt", description="the text file in the data folder")
    length: list[Annotated[int, Field(ge=2)]] = Field([512], min_length=1, description="tokens of a window")
    stride: int | None = Field(None, ge=1, description="tokens from one window to the next; by default the length")
    step: int = Field(1, ge=1, description="tokens read at a time, 1 being what decoding does")

    @model_validator(mode="after")
    def _stride_within(self) -> Perplexity:
        if self.stride is not None and self.stride > min(self.length):
            raise UsageError(f"a stride of {self.stride} tokens leaves some out of windows of {min(self.length)}")
        return self

    def sources(self, data: Path | None) -> list[Path]:
        found = source(data, self.file)
        read_text(str(found))
        return [found]

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Return windows: the first ones for seed 0, else a random draw."""
        length = int(point["length"])
        stride = self.stride or length
        ids = list(tokenizer(read_text(str(sources[0])), add_special_tokens=False, verbose=False).input_ids)
        count = (len(ids) - length) // stride + 1
        there = f"'{sources[0]}' has {max(count, 0)} windows of {length} tokens"
        numbers = sorted(drawn(range(count), self.samples, seed, there))
        first = max(1, length - stride)
        return [Sample(ids[number * stride :][:length], {"first": first}) for number in numbers]

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        logs, cost = subject.score(sample.ids, sample.facts["first"], self.step)
        return TaskOutcome({"nll": -fmean(logs)}, cost)
