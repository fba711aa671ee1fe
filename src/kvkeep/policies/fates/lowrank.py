"""``lowrank``: what leaves keeps only its part in each projection's strongest directions (KV-Direct, section 5.7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.models.adapter import Adapter
from kvkeep.models.binding import bind
from kvkeep.policies.fates.base import Fate, exact_entries, rooms
from kvkeep.policies.fates.grouped import GroupedFate
from kvkeep.policies.request import Exactness, LiveFate, Request
from kvkeep.stores.groups import GROUP, Groups
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter
from kvkeep.stores.selected import SelectedLayer
from kvkeep.stores.whereabouts import Whereabouts


@dataclass(frozen=True)
class LowRank(Fate):
    """``rank`` numbers for each key and value of a head: its coordinates in the left singular vectors of the head's
    W_k and W_v, keys before rotation. It is here to show what the paper shows: that it fails. ``exact``: as for
    'quantize'; 1 leaves all but the newest to it."""

    rank: int = 32
    exact: float = 0.5

    label: ClassVar[str] = "truncated to a low rank"
    recall: ClassVar[str] = "approximately, from its coordinates"
    exactness: ClassVar[Exactness] = Exactness.LOSSY
    records: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"A rank is 1 or more, not {self.rank}.")

    def resident(self, geometry: ModelGeometry, entries: int) -> int:
        """Return the exact ones."""
        return exact_entries(self.exact, entries)

    def build(self, request: Request, ledger: Ledger, meter: Meter) -> LiveFate:
        """Return a store for as many groups as the budget has room for."""
        adapter, layers = bind(request.model), request.geometry.full_layers
        adapter.require("turn", [layer.index for layer in layers], "low rank", "use another method")
        bases = {layer.index: _bases(adapter, layer, self.rank) for layer in layers}

        def size(layer: LayerGeometry) -> int:
            keys, values = bases[layer.index]
            return GROUP * (keys.shape[2] + values.shape[2]) * request.geometry.dtype_bytes

        return _LowRank(adapter, bases, rooms(request, self, size), ledger, meter)


def _bases(adapter: Adapter, layer: LayerGeometry, rank: int) -> tuple[Tensor, Tensor]:
    """Return the first left singular vectors of each head's W_k and W_v: (kv_heads, dim, rank)."""
    attention = adapter.layers[layer.index].self_attn
    if not hasattr(attention, "k_proj") or getattr(attention, "k_norm", None) is not None:
        raise UnsupportedModelError(
            f"'{adapter.family}' has no plain key projection to take the rank of; use another method."
        )
    bases = []
    for projection, dim in ((attention.k_proj, layer.key_dim), (attention.v_proj, layer.value_dim)):
        weight = projection.weight.detach().float().view(layer.kv_heads, dim, -1)
        bases.append(torch.linalg.svd(weight, full_matrices=False).U[:, :, :rank].to(projection.weight.dtype))
    return bases[0], bases[1]


class _LowRank(GroupedFate):
    def __init__(
        self,
        adapter: Adapter,
        bases: dict[int, tuple[Tensor, Tensor]],
        room: dict[int, int],
        ledger: Ledger,
        meter: Meter,
    ) -> None:
        super().__init__(Whereabouts.QUANTISED, room)
        self.adapter, self.bases, self.ledger, self.meter = adapter, bases, ledger, meter

    def encode(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> list[Tensor]:
        bases = self.bases[layer]
        plain = self._turned(layer, keys.flatten(0, 1), slots.flatten(0, 1), -1).view_as(keys)
        return [plain @ bases[0], values @ bases[1]]

    def read(self, layer: SelectedLayer, query: Tensor, groups: Groups) -> Iterator[tuple[Tensor, bool, Any, Any]]:
        bases = [basis.repeat(layer.rows, 1, 1).transpose(1, 2) for basis in self.bases[layer.index]]
        parts, slots = groups.by_lane()
        keys, values = (part.flatten(1, 2) @ basis for part, basis in zip(parts, bases, strict=True))
        with self.meter.holding(keys, values):
            keys = self._turned(layer.index, keys, slots.flatten(1), 1)
            yield slots.flatten(1), groups.holes, keys[:, None], values[:, None]

    def _turned(self, layer: int, keys: Tensor, slots: Tensor, sign: int) -> Tensor:
        """Rotate keys (lanes, n, dim) to the positions of their slots, or (``sign`` -1) back from there."""
        positions = self.ledger.positions.view().squeeze(-1)
        lanes = positions.repeat_interleave(len(slots) // len(positions), 0)
        by = sign * lanes.gather(1, slots.clamp(min=0).long())
        return self.adapter.turn(layer, keys[:, None], self.adapter.angles(layer, keys, by))[:, 0]
