"""Comparisons on several passages, and their summary: means of each method at each budget, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from kvkeep_lab.partial import INTERRUPTED
from kvkeep_lab.reference import Comparison, ReferenceCase, ReferenceRow
from kvkeep_lab.statistics import Estimate, estimate

MEASURES = ("match", "kl_free_mean", "kl_mean", "top1", "perplexity")
"""Fields of a row that have a mean and an interval over passages. Those of perplexity are computed from its logarithm.
"""


@dataclass(frozen=True)
class Passage:
    """A comparison on one passage."""

    text: str
    """Name of the file; "" for a prompt."""
    seed: int | None
    """Seed of the passage's place in the text; None for the beginning of the text."""
    found: Comparison


@dataclass(frozen=True)
class MethodAtBudget:
    """One method at one budget."""

    method: str
    budget: str | None
    rows: tuple[ReferenceRow, ...]
    """The row of every passage on which it was measured, at least one."""
    full_bytes: tuple[int, ...]
    """For each row, the bytes of an unbounded cache in bfloat16."""

    @property
    def label(self) -> str:
        """Method and budget."""
        return ReferenceCase(self.method, self.budget).label

    @property
    def exactness(self) -> str:
        """Exactness that the cache reported at the end of the last passage."""
        return self.rows[-1].exactness

    @property
    def entries(self) -> tuple[int, int] | None:
        """Minimum and maximum entries of a full layer; None without a budget."""
        found = [row.entries for row in self.rows if row.entries is not None]
        return (min(found), max(found)) if found else None

    def values(self, name: str) -> list[float]:
        """Return a field of the rows that have it."""
        return [float(value) for row in self.rows if (value := getattr(row, name)) is not None]

    def mean(self, name: str) -> float | None:
        """Return a field's mean; None if no row has the field."""
        values = self.values(name)
        return fmean(values) if values else None

    def largest(self, name: str) -> float | None:
        """Return a field's maximum; None if no row has the field."""
        return max(self.values(name), default=None)

    def estimate(self, name: str) -> Estimate | None:
        """Return mean and interval of one of :data:`MEASURES` over the passages."""
        if not (values := self.values("nll" if name == "perplexity" else name)):
            return None
        found = estimate(values)
        if name != "perplexity":
            return found
        return Estimate(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.n)

    def bytes(self, of: Callable[[ReferenceRow], int]) -> float:
        """Return the mean of the bytes that ``of`` returns for a row."""
        return fmean(of(row) for row in self.rows)

    @property
    def held_bytes(self) -> float:
        """Mean bytes of entries that attention reads, in full or compressed."""
        return self.bytes(lambda row: row.held_bytes)

    @property
    def share(self) -> float | None:
        """Mean share of the unbounded cache's bytes in bfloat16; None if these are unknown."""
        if not all(self.full_bytes):
            return None
        return fmean(row.held_bytes / full for row, full in zip(self.rows, self.full_bytes, strict=True))

    def positions(self, name: str) -> list[float]:
        """Return the mean over passages of a list of numbers, one per position."""
        return [fmean(values) for values in zip(*(getattr(row, name) for row in self.rows), strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Return method, budget, number of passages, and the estimates, as plain types."""
        found = {name: self.estimate(name) for name in MEASURES}
        facts = {"method": self.method, "budget": self.budget, "class": self.exactness, "n": len(self.rows)}
        estimates = {name: None if one is None else asdict(one) for name, one in found.items()}
        return {**facts, **estimates, "held_bytes": self.held_bytes}


@dataclass(frozen=True)
class Comparisons:
    """The compared passages, in order."""

    passages: list[Passage]
    asked: int
    """Number of requested passages."""
    left_out: list[str] = field(default_factory=list)
    """A sentence for each text without a passage."""

    @property
    def single(self) -> bool:
        """Whether there is one text with one passage."""
        return self.asked == 1 and not self.left_out

    @property
    def reference(self) -> MethodAtBudget:
        """The reference on all passages."""
        rows = tuple(one.found.reference for one in self.passages)
        return MethodAtBudget(rows[0].method, None, rows, tuple(one.found.whole_bytes for one in self.passages))

    @property
    def lines(self) -> list[MethodAtBudget]:
        """The measured cases, in the order of the first passage."""
        of: dict[tuple[str, str | None], list[tuple[ReferenceRow, int]]] = {}
        for one in self.passages:
            for row in one.found.rows:
                measured = of.setdefault((row.method, row.budget), [])
                measured += [] if row.error else [(row, one.found.whole_bytes)]
        return [MethodAtBudget(*case, *zip(*found, strict=True)) for case, found in of.items() if found]

    @property
    def refusals(self) -> list[str]:
        """A sentence for each case without measurements, with its reason. It includes cases that an interruption
        prevented."""
        found: dict[tuple[str, str], int] = {}
        measured = {line.label for line in self.lines}
        for row in (row for one in self.passages for row in one.found.rows):
            label = ReferenceCase(row.method, row.budget).label
            if row.error and (row.error != INTERRUPTED or label not in measured):
                found[label, row.error] = found.get((label, row.error), 0) + 1
        many = "" if self.single else " on {} of {} passages"
        return [
            f"`{label}`{many.format(count, len(self.passages))}: {error}" for (label, error), count in found.items()
        ]

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens of the shortest and of the longest prompt."""
        tokens = [one.found.prompt_tokens for one in self.passages]
        return min(tokens), max(tokens)

    @property
    def new_tokens(self) -> int:
        """Tokens generated on each passage."""
        return self.passages[0].found.new_tokens

    @property
    def interrupted(self) -> bool:
        """Whether an interruption prevented some passages."""
        return len(self.passages) < self.asked

    @property
    def measured(self) -> str:
        """Description of the tokens read and generated, with the number of planned passages."""
        low, high = self.sizes
        read = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        if self.single:
            return f"{read} tokens read, {self.new_tokens} written"
        count = f"{len(self.passages)} of {self.asked}" if self.interrupted else f"{self.asked}"
        several = f"{count} passage{'s' if self.asked > 1 else ''} of {read} tokens"
        return f"{several}, {self.new_tokens} written after each"

    @property
    def texts(self) -> str:
        """The texts, with the number of passages of each."""
        counts: dict[str, int] = {}
        for one in self.passages:
            counts[one.text] = counts.get(one.text, 0) + 1
        return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items() if name)
