"""``asymkv``: weights the keys of a pair by the squared gradient of the loss (AsymKV, in the form of
arXiv:2603.00907, Eq. 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.policies.papers import Paper
from kvkeep.stores.evicted.pairs import Pairs
from kvkeep_lab.published.by_queries import NeighboursByQueries, Queries
from kvkeep_lab.published.papers import ASYMKV


def energy(output: Tensor) -> Tensor:
    """Return the loss that is differentiated: half the sum of squares of a layer's outputs.

    The papers differentiate the model's loss on the chunk through all layers. Here each layer has a separate loss,
    which is available when the layer runs; its gradient by the output is the output. The effect of later layers is
    ignored.
    """
    return output.square().sum() / 2


@dataclass(frozen=True)
class AsymKV(NeighboursByQueries):
    """The least attended neighbours become one, whose key is weighted by squared gradients, channel by channel."""

    source: ClassVar[str] = "AsymKV (Cui and Xu, 2025); arXiv:2603.00907, Eq. 3"
    papers: ClassVar[Sequence[Paper]] = (ASYMKV,)

    def clues(self, queries: Queries) -> Tensor:
        """Return the squares of the gradient by each key, (lanes, entries, dim): the diagonal of the Fisher matrix."""
        gradient = torch.zeros_like(queries.keys)
        with torch.enable_grad():
            keys = queries.keys.detach().requires_grad_()
            for block in queries.blocks():
                loss = energy(block.weights(keys) @ block.values * block.real)
                gradient += torch.autograd.grad(loss, keys)[0]
        return gradient.square()

    def share(self, pairs: Pairs) -> Tensor:
        """Return h11 / (h11 + h22), (lanes, pairs, dim)."""
        assert pairs.clues is not None
        first, second = pairs.clues
        return first / (first + second)
