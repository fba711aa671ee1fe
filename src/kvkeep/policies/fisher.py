"""How much each layer's keys and values matter: the Fisher information of W_k and W_v (KVReviver, appendix D).

The information is the expectation of the squared gradient of log p(text) with regard to a weight, over texts that the
model itself would write. So, unless there is a text of the caller's, the model writes a few: 4 of 128 tokens, sampled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvkeep.errors import UnsupportedModelError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import decoder_of, layers_of
from kvkeep.models.packed import PackedLinear

TOKENS, SAMPLES = 128, 4
"""Tokens of a sample, and how many there are."""


def information(model: Any, geometry: ModelGeometry, ids: Tensor | None = None) -> Tensor:
    """Return the Fisher information of W_k and W_v, summed over both, of each full layer: (layers,) float64.

    Measured once for each model and remembered: on ``ids`` (texts, tokens), each row one sample, or on texts of the
    model's own. Takes one pass with gradients for each text. Raises UnsupportedModelError for fused projections.
    """
    known = getattr(model, "_kvkeep_information", None)
    if known is None or ids is not None:
        known = model._kvkeep_information = _measured(
            model, geometry, _written(model, geometry) if ids is None else ids
        )
    return known


@torch.inference_mode(False)
def _measured(model: Any, geometry: ModelGeometry, ids: Tensor) -> Tensor:
    weights: list[Tensor] = []
    for layer in geometry.full_layers:
        attention = getattr(layers_of(decoder_of(model))[layer.index], "self_attn", None)
        projections = [getattr(attention, name, None) for name in ("k_proj", "v_proj")]
        if None in projections:
            raise UnsupportedModelError(
                f"'{geometry.model_type}' has no projections of keys and values of their own, whose information could "
                "be measured; give a file of scores, or use h2o, whose layers have equal budgets."
            )
        if any(isinstance(projection, PackedLinear) for projection in projections):
            raise UnsupportedModelError(
                "Packed weights have no gradient, by which information is measured; load the model with weights "
                "float32, give a file of scores, or use h2o, whose layers have equal budgets."
            )
        weights += [projection.weight for projection in projections]  # type: ignore[union-attr]
    before = [weight.requires_grad for weight in weights]
    total = torch.zeros(len(weights), dtype=torch.float64)
    try:
        for weight in weights:
            weight.requires_grad_(True)
        with torch.enable_grad():
            for row in ids.to(weights[0].device).clone().split(1):  # a clone, should it come from inference mode
                loss = model(input_ids=row, labels=row, use_cache=False).loss * (row.shape[1] - 1)
                gradients = torch.autograd.grad(loss, weights)
                total += torch.stack([gradient.double().square().sum() for gradient in gradients]).cpu()
    finally:
        for weight, own in zip(weights, before, strict=True):
            weight.requires_grad_(own)
    return total.view(-1, 2).sum(1)


@torch.no_grad()
def _written(model: Any, geometry: ModelGeometry) -> Tensor:
    """Return texts of the model's own, sampled: (SAMPLES, tokens)."""
    generator, device = torch.Generator().manual_seed(0), next(model.parameters()).device
    start = getattr(model.config, "bos_token_id", None)
    text = [torch.full((SAMPLES, 1), start if isinstance(start, int) else 0)]
    cache = DynamicCache(config=model.config)
    for _ in range(min(TOKENS, geometry.max_positions or TOKENS) - 1):
        logits = model(input_ids=text[-1].to(device), past_key_values=cache, use_cache=True).logits[:, -1]
        text.append(torch.multinomial(logits.float().softmax(-1).cpu(), 1, generator=generator))
    return torch.cat(text, 1)
