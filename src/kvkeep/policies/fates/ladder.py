"""``ladder``: what leaves is kept in fewer and fewer bits, the less attention it gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedModelError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.policies.fates.base import Fate, exact_entries, spare
from kvkeep.policies.request import Exactness, LiveFate, Request
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter
from kvkeep.stores.rungs import RUNGS, Ladder, channel_bytes, group_bytes
from kvkeep.stores.selected import SelectedLayer
from kvkeep.stores.whereabouts import Whereabouts


@dataclass(frozen=True)
class OnLadder(Fate):
    """Entries that leave are kept at 16, 8 or 4 bits, or 4 for keys and 2 for values, in what the budget's exact
    entries leave over. As the text grows, groups of 32 that get least attention fall a rung, and from the last one they
    are gone; attention that returns to a group keeps it where it is. ``exact``: as for 'quantize', but a quarter of the
    budget at most."""

    exact: float = 8

    label: ClassVar[str] = "quantised by attention"
    recall: ClassVar[str] = "approximately, from its codes"
    exactness: ClassVar[Exactness] = Exactness.LOSSY

    def resident(self, geometry: ModelGeometry, entries: int) -> int:
        """Return the exact ones, a quarter of the budget at most; the group that waits comes on top."""
        return min(exact_entries(self.exact, entries), entries // 4)

    def build(self, request: Request, ledger: Ledger, meter: Meter) -> LiveFate:
        """Return a ladder for each layer. Raises UnsupportedModelError where codes do not divide into bytes."""
        ladders, smallest, width = {}, RUNGS[-1], request.geometry.dtype_bytes

        def least(layer: LayerGeometry) -> int:
            return channel_bytes(layer.value_dim) + group_bytes(layer.key_dim, layer.value_dim, smallest, width)

        for layer, room in spare(request, self, least, min(width, 2)):
            if layer.value_dim % (8 // smallest.values):
                raise UnsupportedModelError(
                    f"Heads of '{request.geometry.model_type}' are {layer.value_dim} wide, which does not divide into "
                    f"bytes at {smallest.values} bits; use quantize:8."
                )
            ladders[layer.index] = Ladder(room, layer.key_dim, layer.value_dim, width, meter)
        return _OnLadder(ladders, meter)


class _OnLadder:
    """It listens: marks of what left go on, so that a group ranks by the attention it gets now."""

    forgets = False

    def __init__(self, ladders: dict[int, Ladder], meter: Meter) -> None:
        self.ladders, self.meter = ladders, meter

    def take(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, marks: Tensor | None) -> None:
        assert marks is not None
        ladder = self.ladders[layer]
        ladder.heads = keys.shape[1]
        ladder.take(*(part.flatten(0, 1) for part in (keys, values, slots, marks)))

    def recall(self, layer: SelectedLayer, query: Tensor) -> Iterator[tuple[Tensor, bool, Any, Any]]:
        ladder = self.ladders[layer.index]
        for rung, slots in ladder.pieces():
            if rung is None:
                keys, values = (part[:, None, : ladder.count].to(query.dtype) for part in ladder.waiting)
                yield slots, True, keys, values
                continue
            assert ladder.channels is not None
            keys, values = rung.read(ladder.channels)
            # What attention writes out of them for a moment: codes as numbers.
            size = 4 * slots.numel() * max(keys.shape[3], values.shape[3])
            self.meter.hold(size)
            yield slots, rung.holes, keys, values
            self.meter.hold(-size)

    def hear(self, layer: SelectedLayer, weights: Sequence[Tensor], queries: int) -> None:
        ladder = self.ladders[layer.index]
        if not weights or ladder.slots is None or ladder.marks is None:
            return
        slots, marks = (part[:, : ladder.used] for part in (ladder.slots, ladder.marks))
        marks.copy_(layer.noted(slots, marks, torch.cat([*weights], 1), queries))

    def exchange(self, layer: SelectedLayer) -> None:
        """Nothing comes back to be resident: bits that are lost stay lost, and an exact entry would lose its own."""

    def whereabouts(self, layer: SelectedLayer, length: int) -> Tensor:
        codes = torch.full((layer.lanes, length + 1), Whereabouts.DROPPED)
        for rung, slots in self.ladders[layer.index].pieces():
            index = slots.long().masked_fill(slots < 0, length).cpu()
            codes.scatter_(1, index, Whereabouts.RESIDENT if rung is None else Whereabouts.QUANTISED)
        return codes[:, :length].unflatten(0, (layer.rows, layer.heads))

    def truncate(self, length: int) -> None:
        for ladder in self.ladders.values():
            ladder.truncate(length)

    def select(self, index: Tensor) -> None:
        for ladder in self.ladders.values():
            ladder.select(index)

    def state(self) -> dict[str, Tensor]:
        return {
            f"fate.{layer}.{name}.{number}": tensor
            for layer, ladder in self.ladders.items()
            for name, tensors in ladder.stores().items()
            for number, tensor in enumerate(tensors)
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        named: dict[int, dict[str, list[Tensor]]] = {}
        for key in sorted(state):  # fewer than ten of each name, so they are in order
            _, layer, name, _ = key.split(".")
            named.setdefault(int(layer), {}).setdefault(name, []).append(state[key])
        for index, stores in named.items():
            self.ladders[index].put(stores)

    @property
    def compressed_bytes(self) -> int:
        return sum(ladder.nbytes for ladder in self.ladders.values())

    @property
    def bookkeeping_bytes(self) -> int:
        return sum(ladder.bookkeeping_bytes for ladder in self.ladders.values())
