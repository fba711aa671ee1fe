"""KV-Direct's Fig. 8: replace the residual stream at one layer, and see what the rest of the model makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import layers_of
from kvkeep.models.binding import bind
from kvkeep.models.forward import probing

DONOR, RECIPIENT = "What is the capital of Australia?", "What language is spoken in France?"  # the paper's, section 5.3


@dataclass(frozen=True)
class Patching:
    """KL(patched || donor) of the next token's distributions, in nats, with the residuals entering ``layer`` replaced.

    also_reads: what later layers read beside the residuals, so that the paper's claim is not about this model.
    """

    layer: int
    kl: float
    also_reads: str = ""

    @property
    def holds(self) -> bool:
        """The residual stream determines everything after it, wherever it is all that is handed on."""
        return self.kl == 0 or bool(self.also_reads)


@torch.no_grad()
def patching(model: Any, tokenizer: Any) -> Iterator[Patching]:
    """Replace a recipient's residuals by a donor's, all positions, at each layer.

    Both prompts are tokenized without a chat template; the longer one loses its first tokens until both are as long.
    """
    decoder = bind(model).decoder
    geometry = ModelGeometry.from_config(model.config)
    device = next(model.parameters()).device
    prompts = [tokenizer(text).input_ids for text in (DONOR, RECIPIENT)]
    length = min(map(len, prompts))
    donor, recipient = (torch.tensor([prompt[-length:]], device=device) for prompt in prompts)
    entering: list[Tensor] = []
    with probing(lambda index, hidden: entering.append(hidden)):
        expected = _distribution(model, donor)
    for index, layer in enumerate(layers_of(decoder)):
        with replacing(layer, hidden_states=entering[index]):
            patched = _distribution(model, recipient)
        kl = float((patched.exp() * (patched - expected)).sum())
        yield Patching(index, kl, _also_reads(model, geometry, index))


@contextmanager
def replacing(layer: nn.Module, **replaced: Any) -> Iterator[None]:
    """Within the block, hand ``layer`` other ``hidden_states`` (its first argument) or other keyword arguments."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        wanted = dict(replaced)
        if args and "hidden_states" in wanted:
            args = (wanted.pop("hidden_states"), *args[1:])
        return args, kwargs | wanted

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _distribution(model: Any, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits[0, -1].double().log_softmax(-1)


def _also_reads(model: Any, geometry: ModelGeometry, index: int) -> str:
    if getattr(model.config.get_text_config(decoder=True), "hidden_size_per_layer_input", None):
        return "an embedding of the token at every layer"
    sources = {layer.source for layer in geometry.layers[index:] if layer.source < index}
    return f"the keys and values of layer {min(sources)}" if sources else ""
