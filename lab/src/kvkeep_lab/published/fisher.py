"""The importance of each layer's keys and values: the Fisher information of W_k and W_v (KVReviver, appendix D).

The information is the expectation of the squared gradient of log p(text) with regard to a weight, over texts of the
model's distribution. Unless the caller gives texts, the model samples 4 of 128 tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvkeep.errors import UnsupportedModelError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import decoder_of, layers_of

TOKENS, SAMPLES = 128, 4
"""Tokens of a sample, and the number of samples."""


def information(model: Any, geometry: ModelGeometry, ids: Tensor | None = None) -> Tensor:
    """Return the Fisher information of W_k and W_v, summed over both, of each full layer: (layers,) float64.

    It is measured once for each model: on ``ids`` (texts, tokens), each row one sample, or on texts that the model
    samples. Each text takes one pass with gradients. Raises UnsupportedModelError for fused projections.
    """
    known = getattr(model, "_kvkeep_information", None)
    if known is None or ids is not None:
        known = model._kvkeep_information = _measured(
            model, geometry, _written(model, geometry) if ids is None else ids
        )
    return known


@torch.inference_mode(False)
def _measured(model: Any, geometry: ModelGeometry, ids: Tensor) -> Tensor:
    found = torch.zeros(len(geometry.full_layers), dtype=torch.float64)
    leaves = list[Tensor]()

    def leaf(module: Any, given: Any, output: Tensor) -> Tensor:
        leaves[:] = [output.detach().requires_grad_()]
        return leaves[0]

    handles = [model.get_input_embeddings().register_forward_hook(leaf)]
    try:
        for number, layer in enumerate(geometry.full_layers):
            attention = getattr(layers_of(decoder_of(model))[layer.index], "self_attn", None)
            for projection in (getattr(attention, name, None) for name in ("k_proj", "v_proj")):
                if projection is None:
                    raise UnsupportedModelError(
                        f"'{geometry.model_type}' has no projections of keys and values of their own, whose "
                        "information could be measured; give a file of scores, or use h2o, whose layers have equal "
                        "budgets."
                    )
                handles.append(projection.register_forward_hook(partial(_listen, found, number)))
        with torch.enable_grad():
            for row in ids.to(next(model.parameters()).device).clone().split(1):  # the ids may be an inference tensor
                loss = model(input_ids=row, labels=row, use_cache=False).loss * (row.shape[1] - 1)
                torch.autograd.grad(loss, leaves)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _listen(found: Tensor, number: int, module: Any, given: tuple[Tensor], output: Tensor) -> None:
    """Add the squares of a projection's gradient to ``found``. The gradient is computed from the projection's input and
    the gradient of its output, because packed weights have none."""
    entering = given[0].detach()

    def add(gradient: Tensor) -> None:
        of_weight = gradient.flatten(0, 1).float().T @ entering.flatten(0, 1).float()
        found[number] += of_weight.double().square().sum().cpu()

    output.register_hook(add)


@torch.no_grad()
def _written(model: Any, geometry: ModelGeometry) -> Tensor:
    """Return texts that the model samples: (SAMPLES, tokens)."""
    generator, device = torch.Generator().manual_seed(0), next(model.parameters()).device
    start = getattr(model.config, "bos_token_id", None)
    text = [torch.full((SAMPLES, 1), start if isinstance(start, int) else 0)]
    cache = DynamicCache(config=model.config)
    for _ in range(min(TOKENS, geometry.max_positions or TOKENS) - 1):
        logits = model(input_ids=text[-1].to(device), cache=cache, use_cache=True).logits[:, -1]
        text.append(torch.multinomial(logits.float().softmax(-1).cpu(), 1, generator=generator))
    return torch.cat(text, 1)
