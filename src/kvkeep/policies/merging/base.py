"""What a method that merges neighbours is: parameters, and how a pair's key is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.budget import MIN_CHUNK
from kvkeep.errors import BudgetError, UsageError
from kvkeep.stores.merged import Asked, Pairs


@dataclass(frozen=True)
class Merging(ABC):
    """How the least attended neighbours become one. One file for each: a frozen dataclass and :meth:`share`.

    sinks: first entries of a row that stay as they are. cap: the largest count a merged entry has, 0 for none. slack:
    how many pairs are merged at once while decoding: a share of the budget, or (from 1 on) their number.
    """

    sinks: int = 32
    cap: int = 5
    slack: float = 0.125

    source: ClassVar[str]
    asks: ClassVar[bool] = False  # whether it works by clues(), from the queries, and not from the mean output

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise UsageError(f"There are 0 sinks or more, not {self.sinks}.")
        if self.cap != 0 and self.cap < 2:
            raise UsageError(f"A merged entry counts 2 or more, or has no cap (0); not {self.cap}.")
        if not self.slack > 0:
            raise UsageError(f"Pairs are merged by a share of the budget, or a number of them, not {self.slack:g}.")

    def check(self, name: str, entries: int) -> None:
        """Raise BudgetError where ``entries`` leave nothing to merge beside the sinks."""
        if entries < self.sinks + 4:
            raise BudgetError(
                f"A budget of {entries} entries leaves '{name}' too few to merge beside {self.sinks} sinks; give it "
                f"{self.sinks + 4}, or fewer sinks ({name.partition(':')[0]}:sinks=4)."
            )

    def chunk(self, entries: int, chunk: int) -> int:
        """Return how many tokens of a prompt to take at a time where nobody says: a quarter of the budget, as in the
        papers (512 of 2,048). A chunk as long as the budget would merge nearly everything each time."""
        return min(chunk, max(MIN_CHUNK, entries // 4))

    @abstractmethod
    def share(self, pairs: Pairs) -> Tensor:
        """Return the first key's share of the merged one, (lanes, pairs, 1 or dim); the second's is the rest."""

    def clues(self, asked: Asked) -> Tensor:
        """Return what it has to know of each entry, (lanes, entries, any): nothing, unless it ``asks``."""
        return asked.keys[..., :0]
