"""``redecode``: decodes evicted tokens again over the resident entries (llama.cpp pull request 21097)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.hook import PassHook
from kvkeep.contracts.part import PredictedBytes, Site
from kvkeep.contracts.recall import Reader, Recall
from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.models.binding import bind
from kvkeep.stores.layer import ReadEvicted
from kvkeep_lab.published.redecoder import Redecoder
from kvkeep_lab.published.split_heads import check_heads_together


@dataclass(frozen=True)
class Redecode(Recall):
    """After a pass, tokens that left in it are decoded again, over what is resident, and are resident again.

    Only the ids and positions of evicted tokens are stored. The tokens attend to the resident entries of the preceding
    text instead of all of it, so their entries differ from the original ones. A KV head restores the entries that it
    evicted, at most half of its budget."""

    limit: int = 64
    """Maximum tokens of a row that are decoded again after a pass."""

    records: ClassVar[bool] = True
    label: ClassVar[str] = "decoded again, over what is resident"
    source: ClassVar[str] = "llama.cpp pull request 21097"
    backed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise UsageError(f"Recall 'redecode' decodes at least 1 token again, not {self.limit}.")

    def refuses(self, method: Any) -> str | None:
        if method.fate.stores.keeps or method.fate.stores.makes_room:
            return (
                "Recall 'redecode' computes dropped entries again, but with this fate evicted entries are still "
                "attended in another form and would count twice; use fate 'drop'."
            )
        return None

    def check(self, model: Any, geometry: ModelGeometry, entries: int, chunk: int) -> None:
        """Raise UnsupportedModelError where heads are split: a token runs again where one head lacks it, through all
        heads."""
        check_heads_together(model, "recall 'redecode'")

    def reader(self, site: Site, shared: Any) -> Reader:
        """Return a plain reader. Raises UnsupportedModelError if the layers cannot run one at a time, or if a layer
        drops old entries itself."""
        if site.first:
            layers, instead = site.geometry.full_layers, "use 'fetch-on-miss'"
            if len(layers) < len(site.geometry.layers):
                raise UnsupportedModelError(
                    f"'{site.geometry.model_type}' has layers that keep no entries of old tokens, so none can be "
                    f"decoded again; {instead}."
                )
            bind(site.model).require("advance", [layer.index for layer in layers], "recall 'redecode'", instead)
        return ReadEvicted()

    def hook(self) -> PassHook:
        return Redecoder(self.limit)

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, tokens: int, away: int) -> PredictedBytes:
        """Return the bytes of the residuals of a pass, and of the mask of its tokens."""
        seen = layer.kv_heads * tokens  # one byte per slot
        return PredictedBytes(workspace=min(self.limit, tokens) * (geometry.hidden_size * geometry.dtype_bytes + seen))
