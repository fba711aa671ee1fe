"""The description of a model for the cost model: its geometry and the sizes of its matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import decoder_of, layers_of
from kvkeep.models.matrices import built


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, known without loading it."""

    geometry: ModelGeometry
    weights: int
    """Elements of all parameters."""
    weight_bytes: int
    layer: float
    """Mean elements of the matrices of one layer, with all experts."""
    active: float
    """Mean elements of a layer that one token is multiplied by."""
    experts: int
    """Experts of a layer; 1 without a mixture of experts."""
    chosen: int
    """Experts that a token chooses; 1 without a mixture of experts."""
    head: int
    """Elements of the output matrix (to logits)."""
    inner: int
    """Inner width of a layer's MLP, summed over the experts that one token chooses."""

    def touched(self, rows: float) -> float:
        """Return the elements of one layer that ``rows`` tokens read, with each expert that a token chose."""
        if self.chosen == self.experts:
            return self.active
        share = self.chosen / self.experts
        experts = (self.layer - self.active) / (1 - share)  # elements of all experts
        return self.layer - experts + experts * (1 - (1 - share) ** rows)


def shape_of(config: Any, dtype_bytes: int | None = None, weight_bytes: int | None = None) -> Shape:
    """Return the shape of the model of ``config``. The model is built on torch's meta device, without memory.

    dtype_bytes: bytes of a cache element; default: those of the config's dtype. weight_bytes: bytes of all weights;
    default: those in that dtype.

    Raises UnsupportedModelError if transformers cannot build the model, or the size of its cache is unknown.
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
    """Return the largest value of the attributes ``names`` of ``config``; 0 if all are missing."""
    return max(int(getattr(config, name, None) or 0) for name in names)
