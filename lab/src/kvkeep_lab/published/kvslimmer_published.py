"""``kvslimmer-published``: KVSlimmer by its authors' code (github.com/lianjunl13-sudo/KVSlimmer; arXiv:2603.00907).

The code differs from Eq. 33:

* norms of residuals are L1 norms, and |c12| uses the sum of both norms instead of the norm of the sum;
* attention is normalised over the entries that may merge;
* values are sums, and o is therefore a sum as well;
* |c11| is a mean over all chunks read;
* weights are not clamped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.policies.fates.kvslimmer import diagonal
from kvkeep_lab.published.ahead_pairs import EPS, Seen
from kvkeep_lab.published.neighbours_ahead import NeighboursAhead


@dataclass(frozen=True)
class KVSlimmerPublished(NeighboursAhead):
    """The neighbours that the next chunk attends to least become one, as KVSlimmer's published code does it."""

    source: ClassVar[str] = "arXiv:2603.00907, published code"
    averages: ClassVar[bool] = True

    def sensitivity(self, seen: Seen) -> Tensor:
        """Return a (1 - 2 a) |v - o|, with the L1 norm; o is the sum of a v."""
        alpha = seen.alpha[..., None]
        output = (alpha * seen.sums).sum(1, keepdim=True)
        return diagonal(alpha) * (seen.sums - output).abs().sum(-1, keepdim=True)

    def weights(self, alpha: tuple[Tensor, Tensor], sensitivity: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return |c11| - |c12| and |c22| - |c12|. |c12| = a1 a2 (d1 + d2), where d are the norms in the
        sensitivities."""
        residuals = [norm / (diagonal(share) + EPS) for norm, share in zip(sensitivity, alpha, strict=True)]
        both = alpha[0] * alpha[1] * (residuals[0] + residuals[1])
        return sensitivity[0] - both, sensitivity[1] - both
