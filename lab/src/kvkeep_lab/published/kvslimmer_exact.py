"""``kvslimmer-exact``: KVSlimmer with the gradient, which its closed form omits (arXiv:2603.00907, Eq. 30)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.policies.fates.kvslimmer import best_share, diagonal, mixed
from kvkeep.stores.evicted.pairs import Pairs
from kvkeep_lab.published.asymkv import energy
from kvkeep_lab.published.by_queries import NeighboursByQueries, Queries


@dataclass(frozen=True)
class KVSlimmerExact(NeighboursByQueries):
    """The least attended neighbours become one, whose key follows from the Hessian with the loss's gradient."""

    source: ClassVar[str] = "arXiv:2603.00907, Eq. 30"

    def clues(self, queries: Queries) -> Tensor:
        """Return g11 of each entry and its g12 with the next, (lanes, entries, 2): the sum of E c_ij over the queries.
        Backpropagation gives E."""
        found = torch.zeros(*queries.keys.shape[:2], 2, device=queries.keys.device)
        for block in queries.blocks():
            weights = block.weights(block.keys)
            output = weights @ block.values
            with torch.enable_grad():
                leaf = output.detach().requires_grad_()
                gradient = torch.autograd.grad(energy(leaf * block.real), leaf)[0]
            residual = gradient @ block.values.transpose(1, 2) - (gradient * output).sum(-1, keepdim=True)
            found[..., 0] += (diagonal(weights) * residual).sum(1)
            both = residual[..., :-1] + residual[..., 1:]
            found[:, :-1, 1] += (mixed(weights[..., :-1], weights[..., 1:]) * both).sum(1)
        return found

    def share(self, pairs: Pairs) -> Tensor:
        """Return (g11 + g12) / (g11 + 2 g12 + g22). For an entry that was merged in this pass, g12 is the sum of both
        entries' g12, which is an approximation."""
        assert pairs.clues is not None
        (first, both), second = pairs.clues[0].split(1, 2), pairs.clues[1][..., :1]
        return best_share(first, both, second)
