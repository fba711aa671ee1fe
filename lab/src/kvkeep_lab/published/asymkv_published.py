"""``asymkv-published``: AsymKV by its authors' code (github.com/the-scale-lab/Asymkv; arXiv:2506.05410).

The authors' code averages gradients over chunks only above a number of entries that it never reaches, so this method
does not average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvkeep.errors import UnsupportedModelError
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.papers import Paper
from kvkeep_lab.published.ahead_pairs import Seen
from kvkeep_lab.published.lookahead import check_gradients
from kvkeep_lab.published.neighbours_ahead import NeighboursAhead
from kvkeep_lab.published.papers import ASYMKV


@dataclass(frozen=True)
class AsymKVPublished(NeighboursAhead):
    """The neighbours that the next chunk attends to least become one, by the gradient of the model's own loss on it."""

    source: ClassVar[str] = "AsymKV (Cui and Xu, NeurIPS 2025), published code"
    papers: ClassVar[Sequence[Paper]] = (ASYMKV,)
    gradients: ClassVar[bool] = True
    predictable: ClassVar[bool] = False  # the bytes of the graph do not follow from the geometry

    def check(self, model: Any, geometry: ModelGeometry) -> None:
        super().check(model, geometry)
        if model.get_output_embeddings() is None:
            raise UnsupportedModelError(f"'{geometry.model_type}' has no head, and without one there is no loss.")
        check_gradients(model, geometry, "kvslimmer-published")

    def sensitivity(self, seen: Seen) -> Tensor:
        """Return the gradient by each key before rotation, per channel."""
        assert seen.gradient is not None
        return seen.gradient

    def weights(self, alpha: tuple[Tensor, Tensor], sensitivity: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the squares of both gradients: the diagonal of the Fisher matrix (arXiv:2603.00907, Eq. 3)."""
        return sensitivity[0].square(), sensitivity[1].square()
