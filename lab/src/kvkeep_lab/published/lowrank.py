"""``lowrank``: projects an evicted entry onto the strongest directions of its projection (KV-Direct, section 5.7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.contracts.entries import EntryState, Piece
from kvkeep.contracts.part import Site
from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter, storage_bytes
from kvkeep.models.adapter import Adapter
from kvkeep.models.binding import bind
from kvkeep.policies.fates.base import GroupedFate
from kvkeep.stores.evicted.groups import GROUP, Codec
from kvkeep_lab.published.split_heads import check_heads_together


@dataclass(frozen=True)
class LowRank(GroupedFate):
    """``rank`` numbers for each key and value of a head: its coordinates in the left singular vectors of the head's
    W_k and W_v, keys before rotation. The method exists to reproduce the paper's result that it fails."""

    rank: int = 32
    exact: float = 0.5
    """The share of the budget for exact entries, or (from 1 on) their number, at most half of the budget."""

    label: ClassVar[str] = "truncated to a low rank"
    source: ClassVar[str] = "arXiv:2603.19664, section 5.7"
    returns: ClassVar[str] = "approximately, from its coordinates"
    records: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"The rank is at least 1, not {self.rank}.")

    def check(self, model: Any, geometry: ModelGeometry) -> None:
        check_heads_together(model, "fate 'lowrank'")  # bases are computed from the weights of all heads
        adapter, layers = bind(model), geometry.full_layers
        adapter.require("turn", [layer.index for layer in layers], "low rank", "use another method")
        for layer in layers:
            _projections(adapter, layer)

    def size(self, layer: LayerGeometry, geometry: ModelGeometry) -> int:
        # A head's weight has min(head dimension, hidden size) singular vectors.
        ranks = [min(self.rank, dim, geometry.hidden_size) for dim in (layer.key_dim, layer.value_dim)]
        return GROUP * sum(ranks) * geometry.dtype_bytes

    def codec(self, site: Site) -> Codec:
        return Coordinates(bind(site.model), site.layer, self.rank, site.ledger, site.meter)


def _projections(adapter: Adapter, layer: LayerGeometry) -> tuple[Any, Any]:
    attention = adapter.layers[layer.index].self_attn
    normed = any(getattr(attention, name, None) is not None for name in ("k_norm", "k_layernorm"))
    if not hasattr(attention, "k_proj") or normed:
        raise UnsupportedModelError(
            f"'{adapter.family}' has no plain key projection to take the rank of; use another method."
        )
    return attention.k_proj, attention.v_proj


class Coordinates(Codec):
    """Coordinates of keys and values in the first left singular vectors of each head's W_k and W_v."""

    kept = EntryState.QUANTISED

    def __init__(self, adapter: Adapter, layer: LayerGeometry, rank: int, ledger: Ledger, meter: Meter) -> None:
        self.adapter, self.layer, self.ledger, self.meter = adapter, layer, ledger, meter
        self.bases: list[Tensor] = []  # for keys and values, (kv_heads, dim, rank)
        dims = layer.key_dim, layer.value_dim
        for projection, dim in zip(_projections(adapter, layer), dims, strict=True):
            weight = projection.weight.detach().float().view(layer.kv_heads, dim, -1)
            left = torch.linalg.svd(weight, full_matrices=False).U[:, :, :rank]
            self.bases.append(left.to(projection.weight.dtype))

    @property
    def nbytes(self) -> int:
        return storage_bytes(*self.bases)

    def encode(self, keys: Tensor, values: Tensor, slots: Tensor) -> list[Tensor]:
        plain = self._turned(keys, slots, -1)
        return [rows @ basis for rows, basis in zip((plain, values), self._bases(len(slots)), strict=True)]

    def read(self, query: Tensor, parts: list[Tensor], slots: Tensor, gaps: bool) -> Iterator[Piece]:
        bases = self._bases(len(slots))
        keys, values = (part.flatten(1, 2) @ basis.transpose(1, 2) for part, basis in zip(parts, bases, strict=True))
        with self.meter.holding(keys, values):
            keys = self._turned(keys, slots.flatten(1), 1)
            yield Piece(keys[:, None], values[:, None], slots.flatten(1), gaps=gaps)

    def _bases(self, lanes: int) -> list[Tensor]:
        return [basis.repeat(lanes // len(basis), 1, 1) for basis in self.bases]

    def _turned(self, keys: Tensor, slots: Tensor, sign: int) -> Tensor:
        """Rotate keys (lanes, n, dim) to the positions of their slots, or with ``sign`` -1 back."""
        positions = self.ledger.positions.view().squeeze(-1)
        lanes = positions.repeat_interleave(len(slots) // len(positions), 0)
        by = sign * lanes.gather(1, slots.clamp(min=0).long())
        index = self.layer.index
        return self.adapter.turn(index, keys[:, None], self.adapter.angles(index, keys, by))[:, 0]
