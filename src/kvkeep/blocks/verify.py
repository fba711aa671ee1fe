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
    removed: list[str] = field(default_factory=list)
    """A sentence about each damaged block, which was removed."""
    unreadable: list[str] = field(default_factory=list)
    """A sentence about each block that cannot be read, and remains."""
    sessions: int = 0
    """The number of sessions whose reference is as it was written."""
    damaged: dict[str, str] = field(default_factory=dict)
    """The other sessions by name: why they cannot be read."""
    other_version: list[str] = field(default_factory=list)
    """A sentence about each block and session that another version of kvkeep has saved, and remains."""
    incomplete: dict[str, int] = field(default_factory=dict)
    """Sessions by name that have fewer blocks than they were saved with, and how many are missing."""

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged. Blocks that were removed for the quota are no damage, and neither is what others
        have written."""
        return not (self.removed or self.unreadable or self.damaged)


def verify(store: Store) -> Verification:
    """Read all blocks of a store, compare their checksums, and remove the damaged ones; then read all references."""
    store.check()
    found = Verification()
    for name in store.blocks.names():
        try:
            store.blocks.read(name)
        except BlockDamaged as error:
            found.removed.append(str(error))
        except BlockVersion as error:
            found.other_version.append(str(error))
        except StoreError as error:
            if store.blocks.size(name):  # otherwise another program removed it
                found.unreadable.append(str(error))
        else:
            found.blocks, found.bytes = found.blocks + 1, found.bytes + store.blocks.size(name)
    for info in store.sessions():
        if info.problem is not None:
            if info.other_version:
                found.other_version.append(f"The session '{info.name}' cannot be read: {info.problem}")
            elif info.problem != UNSAVED:
                found.damaged[info.name] = info.problem
            continue
        found.sessions += 1
        if info.missing:
            found.incomplete[info.name] = info.missing
    return found
