"""``streaming-llm``: the first few entries and the newest stay (Xiao et al., arXiv:2309.17453, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvkeep.contracts.selector import Candidates, Selector
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import ModelGeometry


@dataclass(frozen=True)
class StreamingLLM(Selector):
    """The first entries and the newest stay."""

    leaves: ClassVar[str] = "all but sinks and newest"
    source: ClassVar[str] = "arXiv:2309.17453"

    sinks: int = 4
    """First entries that stay."""
    positions: str = ""
    """An entry's position: "cache" (its place in the cache, as in the paper, so that a stream can be of any length),
    "absolute" (its place in the text), or "" for "cache" where evicted entries are dropped and "absolute" where they
    come back."""

    def __post_init__(self) -> None:
        if self.positions not in ("", "cache", "absolute"):
            raise UsageError(f"Positions are 'cache' or 'absolute', not '{self.positions}'.")
        if self.sinks < 0:
            raise UsageError(f"The number of sinks is 0 or more, not {self.sinks}.")

    def budgets(self, model: Any, geometry: ModelGeometry, entries: int) -> list[Sequence[int]]:
        """Return the same budget for all layers. Raises BudgetError where the sinks would take all of it."""
        if 0 < entries <= self.sinks:
            raise BudgetError(
                f"The budget has no space for entries beside {self.sinks} sinks; give a larger budget, or fewer sinks."
            )
        return super().budgets(model, geometry, entries)

    def sinks_in_cache(self, drops: bool) -> int | None:
        """Return the sinks unless positions are absolute. Raises UsageError where entries come back and
        need absolute ones."""
        if self.positions == "cache" and not drops:
            raise UsageError(
                "Positions within the cache change with every step, so a recalled entry would be rotated for the wrong "
                "one; leave 'positions' out."
            )
        return self.sinks if drops and self.positions != "absolute" else None

    def rank(self, entries: Candidates) -> Tensor:
        return entries.slots.masked_fill(entries.slots < entries.first + self.sinks, 2**30)
