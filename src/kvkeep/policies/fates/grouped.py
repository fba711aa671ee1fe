"""What fates have in common that keep entries by groups, in another form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from kvkeep.stores.groups import Groups
from kvkeep.stores.selected import SelectedLayer
from kvkeep.stores.whereabouts import Whereabouts


class GroupedFate:
    """A fate at work whose entries are in :class:`~kvkeep.stores.groups.Groups`, one for each layer.

    ``kept``: what becomes of an entry in a group. A subclass says what a group's parts are, and reads them.
    """

    forgets = False

    def __init__(self, kept: Whereabouts, room: Mapping[int, int | None]) -> None:
        self.kept = kept
        self.groups = {layer: Groups(groups, partial(self.encode, layer)) for layer, groups in room.items()}

    @abstractmethod
    def encode(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> list[Tensor]:
        """Return the parts of one group: keys and values (batch, kv_heads, GROUP, dim), slots without the last axis."""

    @abstractmethod
    def read(self, layer: SelectedLayer, query: Tensor, groups: Groups) -> Iterator[tuple[Tensor, bool, Any, Any]]:
        """Yield (slots, holes, keys, values) of what groups hold."""

    def take(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, marks: Tensor | None) -> None:
        """Take entries that leave."""
        self.groups[layer].take(keys, values, slots)

    def recall(self, layer: SelectedLayer, query: Tensor) -> Iterator[tuple[Tensor, bool, Any, Any]]:
        """Yield what the groups give back, and what waits to be a group."""
        groups = self.groups[layer.index]
        if groups.held:
            yield from self.read(layer, query, groups)
        if groups.count:
            keys, values, slots = groups.still_waiting()
            yield slots, True, keys[:, None], values[:, None]

    def whereabouts(self, layer: SelectedLayer, length: int) -> Tensor:
        """Return the codes of what left."""
        return self.groups[layer.index].found(layer.rows, layer.heads, length, self.kept)

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on."""
        for groups in self.groups.values():
            groups.truncate(length)

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""
        for groups in self.groups.values():
            groups.select(index)

    def state(self) -> dict[str, Tensor]:
        """Return what must be saved."""
        return {
            f"fate.{layer}.{name}": tensor
            for layer, groups in self.groups.items()
            for name, tensor in groups.state().items()
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` gave."""
        for layer, groups in self.groups.items():
            own = f"fate.{layer}."
            groups.restore({name.removeprefix(own): one for name, one in state.items() if name.startswith(own)})

    @property
    def compressed_bytes(self) -> int:
        """Bytes of all groups and of what waits."""
        return sum(groups.nbytes for groups in self.groups.values())

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes of slots."""
        return sum(groups.bookkeeping_bytes for groups in self.groups.values())
