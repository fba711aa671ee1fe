"""``kvslimmer``: a pair's key from the Hessian of attention, without a gradient (arXiv:2603.00907, Eq. 33)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.contracts import Pairs
from kvkeep.policies.fates.hessian import alone, best_share, together
from kvkeep.policies.fates.neighbours import Neighbours


@dataclass(frozen=True)
class KVSlimmer(Neighbours):
    """The least attended neighbours become one, whose key follows from attention, values and output alone."""

    source: ClassVar[str] = "arXiv:2603.00907, Eq. 33"

    def share(self, pairs: Pairs) -> Tensor:
        """Return (|c11| - |c12|) / (|c11| - 2 |c12| + |c22|)."""
        own, other, both = (c.norm(dim=-1, keepdim=True) for c in curvatures(pairs))
        return best_share(own, -both, other)


def curvatures(pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """Return c11, c22 and c12 (Eqs. 23-25), (lanes, pairs, value_dim): the second derivatives of the output by the
    scores of both. The paper has one query; here attention and output are means over queries and heads."""
    assert pairs.output is not None
    (first, second), (one, two) = (weight[..., None] for weight in pairs.attention), pairs.values
    one, two = one - pairs.output, two - pairs.output
    return alone(first) * one, alone(second) * two, together(first, second) * (one + two)
