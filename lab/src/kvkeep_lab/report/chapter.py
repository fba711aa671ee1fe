"""The parts of a report: chapters of text, tables and pictures, with verdicts on a paper's claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class VerdictOutcome(StrEnum):
    """The outcome of a paper's claim."""

    DIFFERS = "differs"
    HOLDS = "holds"
    OPEN = "undecided"
    MEASURED = "no verdict"
    UNMEASURED = "not measured"


@dataclass(frozen=True)
class Verdict:
    """The finding about one of a paper's claims."""

    says: str
    """The paper's sentence."""
    outcome: VerdictOutcome
    ours: tuple[str, ...] = ()
    """The measurements with intervals, in sentences of Markdown."""
    samples: int = 0
    """Minimum number of samples of a measurement."""
    reading: str = ""
    """The numeric form of the sentence, in Markdown."""
    why: str = ""
    """Reason why the measurements allow no verdict; "" if they do."""

    @property
    def finding(self) -> str:
        """The outcome as text for people."""
        if self.outcome is VerdictOutcome.MEASURED:
            return f"{self.outcome}, {self.why}"
        if self.outcome is not VerdictOutcome.OPEN:
            return str(self.outcome)
        return f"{self.outcome} with {self.samples} sample{'' if self.samples == 1 else 's'}"


@dataclass(frozen=True)
class Picture:
    """A figure."""

    name: str
    """Name of its files, without a suffix."""
    title: str
    """Its alternative text."""
    draw: Callable[[Path], None]
    """Writes it to a file in the format of the suffix. Raises StoreError if that fails."""


@dataclass(frozen=True)
class Chapter:
    """One experiment as text: the contribution of any kind of experiment to the report."""

    title: str
    blocks: tuple[str | Picture, ...]
    """Markdown (headings from the third level on) and pictures, in order. A chapter without blocks is only listed at
    the beginning of the report."""
    beside: str = ""
    """The paper and its figure or table."""
    theirs: str = ""
    """The paper's model, precision and sizes."""
    ours: str = ""
    """Model, precision and sizes of the measurement."""
    verdicts: tuple[Verdict, ...] = ()
    """Verdicts on the paper's claims, in its order."""
    missing: tuple[str, ...] = ()
    """A sentence for each missing measurement, with its reason."""
    experiment: str = ""
    """The name shared by chapters of other models or settings."""

    @property
    def pictures(self) -> list[Picture]:
        """The pictures among the blocks."""
        return [block for block in self.blocks if isinstance(block, Picture)]
