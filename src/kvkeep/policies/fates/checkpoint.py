"""``checkpoint``: evicted entries are kept in a form from which exact keys and values are rebuilt (KV-Direct)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.part import Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.stores.in_order import InOrder


@dataclass(frozen=True)
class Checkpointed(Fate):
    """Evicted entries are in a checkpoint, and every step reads them from there."""

    kind: str = ""
    """kv, residual, residual:STRIDE or tokens; by default the ``checkpoint`` of the cache."""

    label: ClassVar[str] = "checkpointed"
    source: ClassVar[str] = "KV-Direct, arXiv:2603.19664"
    returns: ClassVar[str] = "all pages, exactly"
    exactness: ClassVar[Exactness] = Exactness.EXACT
    checkpoints: ClassVar[bool] = True

    def store(self, site: Site, shared: Any) -> EvictedStore:
        # With a selector that is not in order every step attends to the checkpoint (Everything).
        return InOrder(site)


@dataclass(frozen=True)
class Recorded(Checkpointed):
    """The same, with the ids of all tokens, so that the text can be read a second time."""

    records: ClassVar[bool] = True
