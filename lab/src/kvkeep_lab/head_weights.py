"""W_Q, W_K and W_V of every head, for any layout of modules.

Weights are separate (Llama), fused in sequence (GPT-2, Phi-3), or fused by head (GPT-NeoX). The layout is found by
trial: on a few tokens, the values read from a projection must equal those that attention receives, up to the norm of
each (Gemma 4 normalises them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.errors import UnsupportedModelError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.binding import bind
from kvkeep.models.packed import PackedLinear
from kvkeep_lab.attention_inputs import Attended, watching

_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_QUERY, _KEY, _VALUE = (("q_proj", "query", "q"), ("k_proj", "key", "k"), ("v_proj", "value", "v"))
_FUSED = ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv", "W_pack")
_TRIAL_TOKENS = 8

Split = Callable[[Tensor], list[Tensor]]
"""Splits the rows of a projection: (rows, any) to (heads, dim, any) of the query, key and value heads."""


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Projections y = W x of one layer, where x is the normalised residual, without bias."""

    layer: int
    module: nn.Module
    """The module that receives x: the query projection or the fused one."""
    query: Tensor
    """(heads, key_dim, hidden) float32."""
    key: Tensor | None
    """(kv_heads, key_dim, hidden) float32; None in a layer that reads another layer's keys."""
    value: Tensor | None
    """(kv_heads, value_dim, hidden) float32; None in a layer that reads another layer's values."""

    @property
    def parts(self) -> dict[str, Tensor]:
        """The existing projections by name."""
        named = {"query": self.query, "key": self.key, "value": self.value}
        return {name: part for name, part in named.items() if part is not None}


@torch.no_grad()
def head_weights(model: Any) -> list[HeadWeights]:
    """Return the weights of every layer of ``model`` in order. Raises UnsupportedModelError for a family whose heads
    have no such weights, or with an unknown layout."""
    adapter = bind(model)
    geometry = ModelGeometry.from_config(model.config)
    if getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"'{adapter.family}' has latent attention: its keys and values come out of one latent by way of a norm, so "
            "no head has a W_K or W_V; take a model with plain projections."
        )
    found = [_modules(adapter.family, index, layer) for index, layer in enumerate(adapter.layers)]
    shown: dict[int, Attended] = {}
    outputs: dict[nn.Module, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda module, args, output: outputs.update({module: output[0]}))
        for modules in found
        for module in modules
    ]
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, geometry.vocab_size, (1, _TRIAL_TOKENS), generator=generator)
    try:
        with watching(lambda attended: shown.update({attended.layer: attended})):
            adapter.decoder(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    weights = []
    for layer, modules in zip(geometry.layers, found, strict=True):
        if layer.index not in shown:
            raise UnsupportedModelError(
                f"'{adapter.family}' attends to no keys at layer {layer.index} ({layer.kind}), so there are no head "
                "weights; take a model whose layers all attend."
            )
        weights.append(
            _read(
                adapter.family, shown[layer.index], modules, outputs, geometry.hidden_size, layer.source == layer.index
            )
        )
    return weights


@contextmanager
def inputs(weights: list[HeadWeights]) -> Iterator[dict[int, Tensor]]:
    """Collect the inputs x of the projections by layer, (batch, n, hidden), within the block. The caller pops them with
    the attention of the layer."""
    taken: dict[int, Tensor] = {}

    def hook(layer: int) -> Any:
        return lambda module, args: taken.update({layer: args[0]})

    handles = [one.module.register_forward_pre_hook(hook(one.layer)) for one in weights]
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()


def _modules(family: str, index: int, layer: nn.Module) -> list[nn.Module]:
    """Return a layer's projections: the fused one, or those of query, key and value. A layer that reads another layer's
    keys has only a query projection; a layer whose values are its keys has no value projection."""
    attention = next((part for name in _ATTENTION if (part := getattr(layer, name, None)) is not None), None)
    while (inner := getattr(attention, "attention", None)) is not None:  # GPT-Neo nests its attention module
        attention = inner
    fused = [part for name in _FUSED if (part := getattr(attention, name, None)) is not None]
    if fused:
        return fused[:1]
    apart = [
        next((part for name in names if (part := getattr(attention, name, None)) is not None), None)
        for names in (_QUERY, _KEY, _VALUE)
    ]
    if apart[0] is None:
        raise UnsupportedModelError(
            f"'{family}' keeps the weights of layer {index} in no module known here (q_proj, k_proj, v_proj, or a "
            "fused one)."
        )
    return [part for part in apart if part is not None]


def _read(
    family: str,
    attended: Attended,
    modules: list[nn.Module],
    outputs: dict[nn.Module, Tensor],
    hidden: int,
    owns_keys: bool,
) -> HeadWeights:
    heads, kv_heads = attended.query.shape[1], attended.key.shape[1]
    key_dim, value_dim = attended.key.shape[-1], attended.value.shape[-1]
    matrices = [_matrix(module, hidden, attended.query) for module in modules]
    if not owns_keys:
        return HeadWeights(attended.layer, modules[0], matrices[0].view(heads, key_dim, -1), None, None)
    if len(modules) == 2:  # values are keys
        modules, matrices = [*modules, modules[1]], [*matrices, matrices[1]]
    rows = [outputs[module].float().T for module in modules]  # (rows, tokens)
    for split in _layouts(heads, kv_heads, key_dim, value_dim):
        try:
            value = split(torch.cat(rows))[2]
        except RuntimeError:  # the layout needs another number of rows
            continue
        made, given = value.transpose(1, 2), attended.value[0]
        if made.shape == given.shape and bool((torch.cosine_similarity(made, given.float(), -1) > 0.999).all()):
            query, key, value = split(torch.cat(matrices))
            return HeadWeights(attended.layer, modules[0], query, key, value)
    raise UnsupportedModelError(
        f"'{family}' lays out the projections of layer {attended.layer} in a way not known here: their output "
        "is not the input of its attention."
    )


def _layouts(heads: int, kv_heads: int, key_dim: int, value_dim: int) -> Iterator[Split]:
    def one_after_another(rows: Tensor) -> list[Tensor]:
        sizes = (heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim)
        parts = rows.split([count * dim for count, dim in sizes])
        return [part.reshape(*size, -1) for part, size in zip(parts, sizes, strict=True)]

    def head_by_head(rows: Tensor) -> list[Tensor]:
        group = rows.view(kv_heads, heads // kv_heads * key_dim + key_dim + value_dim, -1)
        query, key, value = group.split([heads // kv_heads * key_dim, key_dim, value_dim], 1)
        return [query.reshape(heads, key_dim, -1), key, value]

    yield one_after_another
    yield head_by_head


def _matrix(module: nn.Module, hidden: int, like: Tensor) -> Tensor:
    """Return a projection's weight (rows, hidden) in float32: the weight of a linear layer, packed or not, or the
    module's output for unit vectors."""
    if type(module) is nn.Linear:
        return module.weight.detach().float()
    if isinstance(module, PackedLinear):
        return module.dense()
    unit = torch.eye(hidden, device=like.device, dtype=like.dtype)
    return (module(unit) - module(torch.zeros_like(unit[:1]))).T.float()
