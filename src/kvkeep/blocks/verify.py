"""Verifies a store: reads every block and every reference."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvkeep.blocks.store import UNSAVED, Store
from kvkeep.errors import BlockDamaged, BlockVersion, StoreError


@dataclass
class Verification:
    """What was found in a store."""

    blocks: int = 0
    """The number of blocks whose bytes are those that were written."""
    bytes: int = 0
    """Their bytes."""
    sessions: int = 0
    """The number of sessions whose reference is as it was written."""
    damaged: list[str] = field(default_factory=list)
    """A sentence about each block and session that is damaged or cannot be read. Damaged blocks were removed."""
    other_version: list[str] = field(default_factory=list)
    """A sentence about each block and session that another version of kvkeep has saved, and remains."""
    incomplete: dict[str, int] = field(default_factory=dict)
    """Sessions by name that have fewer blocks than they were saved with, and how many are missing."""


def verify(store: Store) -> Verification:
    """Read all blocks of a store, compare their checksums, and remove the damaged ones; then read all references.
    Blocks that were removed for the quota are no damage."""
    store.check()
    found = Verification()
    for name in store.blocks.names():
        try:
            store.blocks.read(name)
            found.blocks, found.bytes = found.blocks + 1, found.bytes + store.blocks.size(name)
        except BlockVersion as error:
            found.other_version.append(str(error))
        except StoreError as error:
            if isinstance(error, BlockDamaged) or store.blocks.size(name):  # otherwise another program removed it
                found.damaged.append(str(error))
    for info in store.sessions():
        if info.problem is None:
            found.sessions += 1
            if info.missing:
                found.incomplete[info.name] = info.missing
        elif info.other_version:
            found.other_version.append(f"The session '{info.name}' cannot be read: {info.problem}")
        elif info.problem != UNSAVED:
            found.damaged.append(info.problem)
    return found
