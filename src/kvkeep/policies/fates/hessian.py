"""The Hessian's blocks of two neighbouring keys, and the best share of the first (KVSlimmer, arXiv:2603.00907).

With a the attention of one query, o its output and r_i = v_i - o, the blocks of keys m and m + 1 are (E . c_ij) q q^T /
d_k (Eq. 26), E = dL/do, where

    c_11 = a_m (1 - 2 a_m) r_m,   c_22 = a_m+1 (1 - 2 a_m+1) r_m+1,   c_12 = -a_m a_m+1 (r_m + r_m+1)     (Eqs. 23-25)

What stands before the residuals is here, so that whoever has vectors, their norms or their products with E may use it.
"""

from __future__ import annotations

from torch import Tensor


def alone(attention: Tensor) -> Tensor:
    """Return a (1 - 2 a), by which c_11 is r_m, and c_22 is r_m+1."""
    return attention * (1 - 2 * attention)


def together(first: Tensor, second: Tensor) -> Tensor:
    """Return -a_m a_m+1, by which c_12 is r_m + r_m+1."""
    return -first * second


def best_share(own: Tensor, both: Tensor, other: Tensor) -> Tensor:
    """Return the first key's share of the merged one from g_11, g_12 and g_22, g_ij = E . c_ij (Eq. 30); the closed
    form has |c_11|, -|c_12| and |c_22| in their place (Eq. 33)."""
    return (own + both) / (own + 2 * both + other)
