"""``redecode``: tokens that left are decoded again, over what is resident (llama.cpp pull request 21097)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.recall import Reader, Recall
from kvkeep.contracts.site import Held, Site
from kvkeep.errors import UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.stores.read_evicted import ReadEvicted


@dataclass(frozen=True)
class Redecode(Recall):
    """After a pass, tokens that left in it are decoded again, over what is resident, and are resident again.

    Their ids and positions are all that is kept of them. They see what is resident of the text before them and not all
    of it, so their entries are not what they were. ``limit``: the most tokens of a row after a pass; a KV head takes
    back what left it, half its budget at most."""

    limit: int = 64

    across_heads: ClassVar[bool] = True  # a token runs again where one head lacks it, through all heads
    label: ClassVar[str] = "decoded again, over what is resident"
    source: ClassVar[str] = "llama.cpp pull request 21097"
    backed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise UsageError(f"At least one token is decoded again, not {self.limit}.")

    @property
    def redecoded(self) -> int:
        return self.limit

    def reader(self, site: Site, round: Any) -> Reader:
        return ReadEvicted()

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, tokens: int, away: int) -> Held:
        """Return the bytes of the residuals of a pass, and of what its tokens see of the text."""
        seen = layer.kv_heads * tokens  # a byte for each slot
        return Held(workspace=min(self.limit, tokens) * (geometry.hidden_size * geometry.dtype_bytes + seen))
