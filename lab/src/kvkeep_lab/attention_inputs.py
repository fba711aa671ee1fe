"""Inputs and outputs of attention in a plain forward pass, for any model family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvkeep.errors import UnsupportedModelError
from kvkeep.models.forward import attending, probing
from kvkeep.step.scores import scores_of
from kvkeep.step.sinks import attend_beyond_sdpa


@dataclass(frozen=True, slots=True)
class Attended:
    """The attention of one layer over a complete text. Queries and keys include norms and rotation."""

    layer: int
    query: Tensor
    """(batch, heads, n, key_dim)."""
    key: Tensor
    """(batch, kv_heads, n, key_dim)."""
    value: Tensor
    """(batch, kv_heads, n, value_dim)."""
    mask: Tensor | None
    """Broadcastable to (batch, 1, n, n); True or 0 marks visible keys. None is causal."""
    scaling: float
    output: Tensor
    """(batch, heads, n, value_dim), in the graph of the pass."""

    def visible(self, queries: Tensor) -> Tensor:
        """Return the mask of the queries (positions, int64): (batch or 1, 1, queries, n) bool."""
        if self.mask is None:
            return (torch.arange(self.key.shape[2], device=queries.device) <= queries[:, None])[None, None]
        rows = self.mask[..., queries, :]
        return rows if rows.dtype == torch.bool else rows >= 0

    def weights(self, queries: Tensor) -> Tensor:
        """Return the attention weights of the queries (positions, int64): (batch, heads, queries, n) float32."""
        keys = grouped(self.key, self.query.shape[1]).float()
        found = scores_of(self.query[:, :, queries].float() @ keys.transpose(-1, -2), self.scaling)
        return found.masked_fill_(~self.visible(queries), float("-inf")).softmax(-1)


def grouped(entries: Tensor, heads: int) -> Tensor:
    """Return keys or values (batch, kv_heads, n, dim) repeated for every query head: (batch, heads, n, dim)."""
    return entries.repeat_interleave(heads // entries.shape[1], 1)


class _Watcher:
    """Computes stock attention and passes its inputs and output to ``see``."""

    def __init__(self, see: Callable[[Attended], None]) -> None:
        self.see = see

    def attends(self, layer_idx: int) -> bool:
        return True

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        if getattr(module, "sinks", None) is not None:
            raise UnsupportedModelError(f"'{type(module).__name__}' has sinks in its attention, and is not recorded.")
        heads = query.shape[1]
        output = attend_beyond_sdpa(module, query, key, value, mask, scaling)
        if output is None:
            output = F.scaled_dot_product_attention(
                query, grouped(key, heads), grouped(value, heads), mask, is_causal=mask is None, scale=scaling
            )
        layer: Any = module.layer_idx
        self.see(Attended(layer, query, key, value, mask, scaling, output))
        return output


@contextmanager
def watching(see: Callable[[Attended], None]) -> Iterator[None]:
    """Call ``see`` within the block with the attention of every layer, in order, of a bound model that runs without a
    cache."""
    with attending(_Watcher(see)), probing(lambda *_: None):
        yield
