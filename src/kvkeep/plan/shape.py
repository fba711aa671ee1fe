"""What the cost model needs to know of a model: its geometry, and the matrices a token goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvkeep.errors import UnsupportedModelError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import decoder_of, layers_of
from kvkeep.models.quiet import quiet


@dataclass(frozen=True)
class Shape:
    """A model that was never loaded.

    weights: elements of all its parameters. layer: elements of matrices in one layer (the mean), all experts counted;
    active: those that one token goes through. experts: how many the layers that have some have, and chosen: how many a
    token goes through (1 and 1 without experts). head: elements of the matrix to the vocabulary. inner: the sum of the
    widths between the two halves of a layer's MLP that one token has.
    """

    geometry: ModelGeometry
    weights: int
    layer: float
    active: float
    experts: int
    chosen: int
    head: int
    inner: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.weights * self.geometry.dtype_bytes

    def touched(self, rows: float) -> float:
        """Return the elements of one layer that ``rows`` tokens read: every expert that one of them chose."""
        if self.experts == 1:
            return self.active
        share = self.chosen / self.experts
        own = (self.layer - self.active) / (1 - share)  # of all experts
        return self.layer - own + own * (1 - (1 - share) ** rows)


def shape_of(config: Any, dtype_bytes: int | None = None) -> Shape:
    """Return the shape of the model that ``config`` describes; it is built without memory (torch's meta device).

    Raises UnsupportedModelError where transformers cannot build it, or its cache cannot be sized.
    """
    from transformers import AutoModelForCausalLM

    geometry = ModelGeometry.from_config(config, dtype_bytes)
    try:
        with torch.device("meta"), quiet():
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"A '{geometry.model_type}' model cannot be built from its config ({str(error).splitlines()[0][:160]})."
        ) from error
    text = config.get_text_config(decoder=True)
    experts = max((int(getattr(text, name, 0) or 0) for name in _EXPERTS), default=0) or 1
    chosen = min(experts, int(getattr(text, "num_experts_per_tok", None) or experts))
    layers = layers_of(decoder_of(model))
    total = active = 0.0
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if parameter.ndim < 2:
                continue
            total += parameter.numel()
            active += parameter.numel() * (chosen / experts if ".experts." in name else 1.0)
    head = model.get_output_embeddings()
    hidden = geometry.hidden_size
    inner = int(getattr(text, "intermediate_size", 0) or 4 * hidden)
    if experts > 1:
        inner = chosen * int(getattr(text, "moe_intermediate_size", None) or inner)
    return Shape(
        geometry,
        sum(parameter.numel() for parameter in model.parameters()),
        total / len(layers),
        active / len(layers),
        experts,
        chosen,
        0 if head is None else head.weight.numel(),
        inner,
    )


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
