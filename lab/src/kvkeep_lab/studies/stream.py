"""``stream``: reads a text of any length through one cache and measures memory, time and perplexity along the text
(StreamingLLM's claim, arXiv:2309.17453, Figs. 3 and 5)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from pydantic import Field

from kvkeep.cache import KeepCache
from kvkeep.errors import UsageError
from kvkeep.memory.meter import Memory
from kvkeep.policies.methods import requested
from kvkeep.stock import memory_of, new_cache
from kvkeep_lab.partial import keeping
from kvkeep_lab.studies.base import BUDGET, BudgetText, Flag, OwnMethod, PlaceName, TextStudy, Trial, counted, text_of
from kvkeep_lab.tables import Table, fixed, megabytes

STEPS = 16
"""Number of tokens at the end of each stretch that are read one by one and timed."""


@dataclass(frozen=True)
class StreamStretch:
    """Consecutive tokens."""

    start: int
    """Index of the first token in the text."""
    tokens: int
    perplexity: float
    """Perplexity of the tokens, each given the preceding tokens that the cache keeps."""
    read_ms: float
    """Milliseconds per token when read in chunks."""
    step_ms: float
    """Median milliseconds per token when read one by one."""
    memory: Memory
    """Memory after the stretch."""


@dataclass(frozen=True)
class Streamed:
    """All stretches."""

    model: str
    method: str | None
    budget: str | None
    stretches: list[StreamStretch]


class StreamStudy(TextStudy):
    """Perplexity, time and memory along a text."""

    name = "stream"
    about = "read a text of any length within constant memory: perplexity, time and bytes along the way"
    protocol = (
        "One cache reads a text in segments of --stretch tokens; a short text is repeated. The last tokens of "
        "each segment are read and timed one by one. Perplexity: each token is predicted from what the cache "
        "keeps of the tokens before it."
    )
    found = Streamed

    method: Annotated[OwnMethod, Flag("--method", "-x")] = Field(
        "streaming-llm", description="cache method ('kvkeep methods' lists them)"
    )
    budget: Annotated[BudgetText, Flag("--budget", "-b")] = Field("512", description=BUDGET)
    tokens: int = Field(20_000, ge=2, description="number of tokens to read; a shorter text is repeated")
    stretch: int = Field(1024, ge=2, description="number of tokens for each row of the table")
    chunk: int | None = Field(None, ge=1, description="tokens processed in one pass")
    where: Annotated[PlaceName | None, Flag("--where", "-w")] = Field(
        None, description="where evicted entries are stored: device, host, disk"
    )
    capacity: int | None = Field(None, ge=1, description="maximum number of entries stored; the oldest are discarded")
    folder: str | None = Field(None, description="folder for the files on disk; by default the user's cache folder")

    def check(self, files: Sequence[Path]) -> None:
        requested(self.method, self.budget, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {"chunk": self.chunk, "where": self.where, "capacity": self.capacity, "folder": self.folder}

    def measure(self, trial: Trial) -> Streamed:
        ids = list(trial.tokenizer(text_of(trial.sources), verbose=False).input_ids)
        if len(ids) < 2:
            raise UsageError("The text is shorter than two tokens; there is nothing to predict.")
        ids = (ids * -(-self.tokens // len(ids)))[: self.tokens]
        cache = new_cache(trial.model, self.method, budget=self.budget, context=len(ids), **self._options)
        found = Streamed(trial.loaded.name, self.method, self.budget, [])
        with keeping(found, found.stretches):
            for row in stretches(trial.model, ids, cache, self.stretch, counted(trial.progress, "reading")):
                found.stretches.append(row)
        return found

    def tables(self, found: Streamed) -> list[Table]:
        table = Table(
            f"{found.method} within {found.budget}",
            [
                "from token",
                "perplexity",
                "prefill, ms per token",
                "one by one, ms per token",
                "resident",
                "everything else",
            ],
        )
        for row in found.stretches:
            others = row.memory.compressed_bytes + sum(row.memory.checkpoint_bytes.values())
            sizes = megabytes(row.memory.resident_bytes), megabytes(others + row.memory.bookkeeping_bytes)
            table.rows.append(
                [f"{row.start:,}", fixed(row.perplexity), fixed(row.read_ms), fixed(row.step_ms, 1), *sizes]
            )
        return [table]


@torch.inference_mode()
def stretches(
    model: Any,
    ids: Sequence[int],
    cache: Any,
    stretch: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[StreamStretch]:
    """Read ``ids`` into ``cache``, ``stretch`` tokens at a time, and yield the measurements of each stretch.

    The last token is only predicted. Raises UsageError before a stretch that exceeds the cache's maximum length; the
    stretches yielded before remain valid.
    """
    tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
    for start in range(0, tokens.shape[1] - 1, stretch):
        part_ids = tokens[:, start : min(start + stretch, tokens.shape[1] - 1)]
        steps = min(STEPS, part_ids.shape[1] - 1)
        if isinstance(cache, KeepCache):
            cache.stream.admit(part_ids.shape[1])
        rows, seconds = [], []
        for part in part_ids.split([part_ids.shape[1] - steps, *[1] * steps], dim=1):
            begin = time.perf_counter()
            rows.append(model(part, cache=cache).logits[0])
            seconds.append(time.perf_counter() - begin)
        expected = tokens[0, start + 1 : start + part_ids.shape[1] + 1]
        loss = torch.nn.functional.cross_entropy(torch.cat(rows).float(), expected)
        progress(start + part_ids.shape[1], tokens.shape[1] - 1)
        read_ms, step_ms = seconds[0] / (part_ids.shape[1] - steps), median(seconds[1:]) if steps else math.nan
        yield StreamStretch(
            start, part_ids.shape[1], math.exp(float(loss)), 1e3 * read_ms, 1e3 * step_ms, memory_of(cache)
        )
