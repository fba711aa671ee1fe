"""The parts of a report: chapters of text, tables and pictures, with verdicts on a paper's claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class VerdictOutcome(StrEnum):
    """What became of a paper's claim here."""

    DIFFERS = "does not hold here"
    HOLDS = "holds here"
    OPEN = "cannot be told"
    MEASURED = "no verdict"
    UNMEASURED = "not measured"


@dataclass(frozen=True)
class Verdict:
    """What was found of one of a paper's claims.

    says: the paper's sentence. ours: what was measured, with intervals, in sentences of Markdown. samples: the fewest
    that it goes by. reading: how the sentence was read as numbers, in Markdown. why: the reason that numbers of ours
    are no verdict, where they are none.
    """

    says: str
    outcome: VerdictOutcome
    ours: tuple[str, ...] = ()
    samples: int = 0
    reading: str = ""
    why: str = ""

    @property
    def finding(self) -> str:
        """The outcome as a person reads it."""
        if self.outcome is VerdictOutcome.MEASURED:
            return f"{self.outcome}, {self.why}"
        if self.outcome is not VerdictOutcome.OPEN:
            return str(self.outcome)
        return f"{self.outcome} from {self.samples} sample{'' if self.samples == 1 else 's'}"


@dataclass(frozen=True)
class Picture:
    """A figure. name: of its files, without a suffix. title: its alternative text. draw: writes it to a file by
    its suffix; raises StoreError if that fails."""

    name: str
    title: str
    draw: Callable[[Path], None]


@dataclass(frozen=True)
class Chapter:
    """One experiment, in words: what every kind of experiment gives to the report.

    beside: the paper and its figure or table. theirs, ours: model, precision and sizes, so that differences can be
    seen. verdicts: on the paper's claims, in its order. missing: what could not be run or was not, and why,
    a sentence each. blocks: Markdown (headings from the third level on) and pictures, in their order; a chapter without
    any is only named at the report's beginning. experiment: the name that chapters of other models or settings share.
    """

    title: str
    blocks: tuple[str | Picture, ...]
    beside: str = ""
    theirs: str = ""
    ours: str = ""
    verdicts: tuple[Verdict, ...] = ()
    missing: tuple[str, ...] = ()
    experiment: str = ""

    @property
    def pictures(self) -> list[Picture]:
        """The pictures among the blocks."""
        return [block for block in self.blocks if isinstance(block, Picture)]
