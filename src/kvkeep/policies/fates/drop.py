"""``drop``: evicted entries are discarded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.part import Site
from kvkeep.contracts.store import EvictedStore


class Dropped(EvictedStore):
    """A store without entries."""

    keeps = False


@dataclass(frozen=True)
class Drop(Fate):
    """Evicted entries are discarded."""

    label: ClassVar[str] = "dropped"
    stores: ClassVar[type[EvictedStore]] = Dropped

    def store(self, site: Site, shared: Any) -> EvictedStore:
        return Dropped()


@dataclass(frozen=True)
class Kept(Drop):
    """Nothing is evicted."""

    label: ClassVar[str] = "kept"
    returns: ClassVar[str] = "not needed"
    exactness: ClassVar[Exactness] = Exactness.EXACT
