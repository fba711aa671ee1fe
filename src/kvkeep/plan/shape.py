"""What the cost model needs to know of a model: its geometry, and the matrices a token goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import decoder_of, layers_of
from kvkeep.models.matrices import built


@dataclass(frozen=True)
class Shape:
    """A model that was never loaded."""

    geometry: ModelGeometry
    weights: int
    """Elements of all parameters."""
    weight_bytes: int
    layer: float
    """Elements of the matrices of one layer (the mean), all experts counted."""
    active: float
    """Those of them that one token goes through."""
    experts: int
    """Experts of the layers that have some; 1 without."""
    chosen: int
    """Experts that a token goes through; 1 without."""
    head: int
    """Elements of the matrix to the vocabulary."""
    inner: int
    """The width inside a layer's MLP, of all experts that one token goes through."""

    def touched(self, rows: float) -> float:
        """Return the elements of one layer that ``rows`` tokens read: of the experts, those that one of them chose."""
        if self.chosen == self.experts:
            return self.active
        share = self.chosen / self.experts
        experts = (self.layer - self.active) / (1 - share)  # elements of all of them
        return self.layer - experts + experts * (1 - (1 - share) ** rows)


def shape_of(config: Any, dtype_bytes: int | None = None, weight_bytes: int | None = None) -> Shape:
    """Return the shape of the model that ``config`` describes; it is built without memory (torch's meta device).

    dtype_bytes: of an element of the cache, by default of the config's dtype. weight_bytes: of all weights, by default
    in that dtype.

    Raises UnsupportedModelError where transformers cannot build it, or its cache cannot be sized.
    """
    geometry = ModelGeometry.from_config(config, dtype_bytes)
    model = built(config)
    text = config.get_text_config(decoder=True)
    experts = _largest(text, _EXPERTS) or 1
    chosen = min(experts, _largest(text, _CHOSEN) or experts)
    layers = layers_of(decoder_of(model))
    total = active = 0.0
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if parameter.ndim < 2:
                continue
            total += parameter.numel()
            active += parameter.numel() * (chosen / experts if "experts" in name.split(".") else 1.0)
    head = model.get_output_embeddings()
    hidden = geometry.hidden_size
    inner = int(getattr(text, "intermediate_size", 0) or 4 * hidden)
    if experts > 1:
        inner = chosen * int(getattr(text, "moe_intermediate_size", None) or inner)
    weights = sum(parameter.numel() for parameter in model.parameters())
    return Shape(
        geometry,
        weights,
        weights * geometry.dtype_bytes if weight_bytes is None else weight_bytes,
        total / len(layers),
        active / len(layers),
        experts,
        chosen,
        0 if head is None else head.weight.numel(),
        inner,
    )


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts")


def _largest(config: Any, names: tuple[str, ...]) -> int:
    """Return the largest number that ``config`` has under one of ``names``, 0 where it has none."""
    return max(int(getattr(config, name, None) or 0) for name in names)
