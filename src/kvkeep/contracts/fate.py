"""Fates: how evicted entries are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.hook import PassHook, ReadingHook
from kvkeep.contracts.part import PredictedBytes, Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import BudgetError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.ledger import Ledger


@dataclass(frozen=True)
class Fate(ABC):
    """How evicted entries are stored. A frozen dataclass whose fields are its parameters."""

    label: ClassVar[str]
    """What the fate does with evicted entries, in a word."""
    source: ClassVar[str] = ""
    """The paper."""
    leaves: ClassVar[str] = ""
    """Which entries are evicted, in a few words, where the fate decides it."""
    returns: ClassVar[str] = "never"
    """How evicted entries come back by themselves."""
    exactness: ClassVar[Exactness] = Exactness.LOSSY
    """What the fate promises about the output."""
    checkpoints: ClassVar[bool] = False
    """Evicted entries are kept in a checkpoint, whose options the cache then takes."""
    records: ClassVar[bool] = False
    """Ids and positions of all tokens are needed."""
    predictable: ClassVar[bool] = True
    """:meth:`holds` returns the bytes of its stores, so the planner lists methods with this fate."""
    stores: ClassVar[type[EvictedStore]] = EvictedStore
    """The class of its stores, or a base class with the same flags."""
    files: ClassVar[Sequence[str]] = ()
    """Parameters that may name files of this machine; a server refuses them in requests."""

    @property
    def kind(self) -> str | None:
        """The kind of checkpoint in the method's name; None where the cache's options choose it."""
        return None

    def refuses(self, method: Any) -> str | None:
        """Return why this fate cannot be the fate of ``method``, a :class:`~kvkeep.policies.registry.Method`, in a
        sentence; None where it can."""
        return None

    def after_second_reading(self) -> Fate:
        """Return the fate, with the defaults for entries that a second reading of the text has scored."""
        return self

    def resident(self, entries: int) -> int:
        """Return how many of a budget's ``entries`` are for resident entries."""
        return entries

    def chunk(self, name: str, entries: int, chunk: int, chosen: bool) -> int:
        """Return the number of prompt tokens to read at a time with a budget of ``entries``: ``chunk``, or fewer unless
        the user has ``chosen`` that number. Raises BudgetError, for method ``name``, where they do not fit."""
        return chunk

    def fits(self, name: str, geometry: ModelGeometry, entries: int) -> None:
        """Raise if the fate does not work within ``entries`` (BudgetError) or with heads of these widths
        (UnsupportedModelError)."""
        if not entries and self.exactness is not Exactness.EXACT:
            raise BudgetError(f"A budget of 0 leaves '{name}' nothing to attend to; only with checkpoints it would.")

    def check(self, model: Any, geometry: ModelGeometry) -> None:
        """Raise UnsupportedModelError if the fate does not work with this model."""

    def shared(self, geometry: ModelGeometry, ledger: Ledger) -> Any:
        """Return the object that the stores of all layers share, or None."""
        return None

    @abstractmethod
    def store(self, site: Site, shared: Any) -> EvictedStore:
        """Return the store of one layer."""

    def hook(self) -> PassHook | None:
        """Return the hook around the forward passes of one cache, or None."""
        return None

    def reading_hook(self, tokens: int) -> ReadingHook | None:
        """Return the hook in the second reading of one layer's text, which has about ``tokens`` tokens, or None."""
        return None

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        """Return the bytes that the store of a layer holds within a budget of ``entries``. left: the number of entries
        that a lane evicts in each pass. The store allocates by the same rule."""
        return PredictedBytes()
