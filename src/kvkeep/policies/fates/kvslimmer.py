"""``kvslimmer``: a pair's key from the Hessian of attention, without a gradient (arXiv:2603.00907, Eq. 33).

With a the attention of one query, o its output and r_i = v_i - o, the blocks of keys m and m + 1 are (E . c_ij) q q^T /
d_k (Eq. 26), E = dL/do, where

    c_11 = a_m (1 - 2 a_m) r_m,   c_22 = a_m+1 (1 - 2 a_m+1) r_m+1,   c_12 = -a_m a_m+1 (r_m + r_m+1)     (Eqs. 23-25)

The factors before the residuals are shared by Eqs. 30 and 33.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.policies.fates.neighbours import Neighbours
from kvkeep.stores.evicted.pairs import Pairs


@dataclass(frozen=True)
class KVSlimmer(Neighbours):
    """Merges the least attended neighbours into one entry, whose key follows from attention, values and output."""

    source: ClassVar[str] = "arXiv:2603.00907, Eq. 33"

    def share(self, pairs: Pairs) -> Tensor:
        """Return (|c11| - |c12|) / (|c11| - 2 |c12| + |c22|)."""
        first, second, mixed = (c.norm(dim=-1, keepdim=True) for c in curvatures(pairs))
        return best_share(first, -mixed, second)


def curvatures(pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """Return c11, c22 and c12 (Eqs. 23-25), (lanes, pairs, value_dim): the second derivatives of the output by the
    scores of both. The paper has one query; here attention and output are means over queries and heads."""
    assert pairs.output is not None
    (first, second), (one, two) = (weight[..., None] for weight in pairs.attention), pairs.values
    one, two = one - pairs.output, two - pairs.output
    return diagonal(first) * one, diagonal(second) * two, mixed(first, second) * (one + two)


def diagonal(attention: Tensor) -> Tensor:
    """Return the factor of c_11 and c_22: a (1 - 2 a)."""
    return attention * (1 - 2 * attention)


def mixed(first: Tensor, second: Tensor) -> Tensor:
    """Return the factor of c_12: -a_m a_m+1."""
    return -first * second


def best_share(first: Tensor, mixed: Tensor, second: Tensor) -> Tensor:
    """Return the first key's share of the merged one from g_11, g_12 and g_22, g_ij = E . c_ij (Eq. 30); the closed
    form has |c_11|, -|c_12| and |c_22| in their place (Eq. 33)."""
    return (first + mixed) / (first + 2 * mixed + second)
