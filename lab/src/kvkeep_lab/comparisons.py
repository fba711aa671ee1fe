"""Comparisons of several passages, and what they say together: means of each method at each budget, with intervals."""

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
"""Fields of a row that have a mean and an interval over passages; a perplexity's are of its logarithm."""


@dataclass(frozen=True)
class Passage:
    """What was compared on one passage. text: the file's name, "" where there is none but a prompt. seed: that drew its
    place in the text; None: it is the text's beginning."""

    text: str
    seed: int | None
    found: Comparison


@dataclass(frozen=True)
class MethodAtBudget:
    """One method at one budget, with the row of every passage on which it was measured: one at least. full_bytes: of
    each, the bytes of an unbounded cache in bfloat16."""

    method: str
    budget: str | None
    rows: tuple[ReferenceRow, ...]
    full_bytes: tuple[int, ...]

    @property
    def label(self) -> str:
        """Method and budget."""
        return ReferenceCase(self.method, self.budget).label

    @property
    def exactness(self) -> str:
        """What the cache called itself in the end, on the last passage."""
        return self.rows[-1].exactness

    @property
    def entries(self) -> tuple[int, int] | None:
        """The fewest and the most entries of a full layer; None where there is no budget."""
        found = [row.entries for row in self.rows if row.entries is not None]
        return (min(found), max(found)) if found else None

    def values(self, name: str) -> list[float]:
        """Return a field of the rows that have it."""
        return [float(value) for row in self.rows if (value := getattr(row, name)) is not None]

    def mean(self, name: str) -> float | None:
        """Return a field's mean; None where no row has it."""
        values = self.values(name)
        return fmean(values) if values else None

    def largest(self, name: str) -> float | None:
        """Return a field's largest value; None where no row has it."""
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
        """Bytes of entries that attention reads, in full or in a smaller form, on average."""
        return self.bytes(lambda row: row.held_bytes)

    @property
    def share(self) -> float | None:
        """These bytes as a share of the unbounded cache's in bfloat16, on average; None where that is not known."""
        if not all(self.full_bytes):
            return None
        return fmean(row.held_bytes / full for row, full in zip(self.rows, self.full_bytes, strict=True))

    def positions(self, name: str) -> list[float]:
        """Return the mean of a list of numbers, one for each position, over the passages."""
        return [fmean(values) for values in zip(*(getattr(row, name) for row in self.rows), strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Return method, budget, how many passages, and the estimates, as plain types."""
        found = {name: self.estimate(name) for name in MEASURES}
        facts = {"method": self.method, "budget": self.budget, "class": self.exactness, "n": len(self.rows)}
        estimates = {name: None if one is None else asdict(one) for name, one in found.items()}
        return {**facts, **estimates, "held_bytes": self.held_bytes}


@dataclass(frozen=True)
class Comparisons:
    """The passages that were compared, in order, of so many that were ``asked`` for. left_out: a sentence for each text
    that has none."""

    passages: list[Passage]
    asked: int
    left_out: list[str] = field(default_factory=list)

    @property
    def single(self) -> bool:
        """Whether there was one text with one passage to compare."""
        return self.asked == 1 and not self.left_out

    @property
    def reference(self) -> MethodAtBudget:
        """The reference of every passage."""
        rows = tuple(one.found.reference for one in self.passages)
        return MethodAtBudget(rows[0].method, None, rows, tuple(one.found.whole_bytes for one in self.passages))

    @property
    def lines(self) -> list[MethodAtBudget]:
        """The cases that have figures, in the order of the first passage."""
        of: dict[tuple[str, str | None], list[tuple[ReferenceRow, int]]] = {}
        for one in self.passages:
            for row in one.found.rows:
                measured = of.setdefault((row.method, row.budget), [])
                measured += [] if row.error else [(row, one.found.whole_bytes)]
        return [MethodAtBudget(*case, *zip(*found, strict=True)) for case, found in of.items() if found]

    @property
    def refusals(self) -> list[str]:
        """A sentence for each case that could not be measured, and its reason; for one that an interruption left
        without a passage, too."""
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
        """Tokens written on each passage."""
        return self.passages[0].found.new_tokens

    @property
    def interrupted(self) -> bool:
        """Whether some passages were not begun."""
        return len(self.passages) < self.asked

    @property
    def measured(self) -> str:
        """What was read and written, in words, and of how many passages an interruption left these."""
        low, high = self.sizes
        read = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        if self.single:
            return f"{read} tokens read, {self.new_tokens} written"
        count = f"{len(self.passages)} of {self.asked}" if self.interrupted else f"{self.asked}"
        several = f"{count} passage{'s' if self.asked > 1 else ''} of {read} tokens"
        return f"{several}, {self.new_tokens} written after each"

    @property
    def texts(self) -> str:
        """The texts, and how many passages are of each."""
        counts: dict[str, int] = {}
        for one in self.passages:
            counts[one.text] = counts.get(one.text, 0) + 1
        return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items() if name)
