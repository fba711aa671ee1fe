"""``streaming-llm``: the first few entries and the newest stay (Xiao et al., arXiv:2309.17453, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.policies.selectors.base import Selector
from kvkeep.stores.selected import Candidates


@dataclass(frozen=True)
class StreamingLLM(Selector):
    """``sinks`` first entries and the last B - sinks.

    positions: "cache" (the paper's: an entry's position is its place in the cache, so a stream never ends), "absolute"
    (where it was read), or "" for "cache" where entries are dropped and "absolute" where they come back.
    """

    sinks: int = 4
    positions: str = ""

    def __post_init__(self) -> None:
        if self.positions not in ("", "cache", "absolute"):
            raise UsageError(f"Positions are 'cache' or 'absolute', not '{self.positions}'.")

    def rank(self, entries: Candidates) -> Tensor:
        """By slot; the sinks stay."""
        return entries.slots.masked_fill(entries.slots < entries.first + self.sinks, 2**30)
