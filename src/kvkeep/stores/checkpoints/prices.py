"""What recall costs on a GPU where keys and values are rebuilt. This is arithmetic; nothing of it was measured."""

from __future__ import annotations

from kvkeep.geometry import ModelGeometry
from kvkeep.stores.checkpoints.spec import CheckpointSpec

FLOPS = 600e12
"""Operations in a second of products in bfloat16 on an H100."""
HOST_BYTES = 50e9
"""Bytes in a second from pinned host memory."""
LONG = 8192
"""The number of tokens from which on running layers again has a price worth a warning."""


def price_of_residuals(spec: CheckpointSpec, geometry: ModelGeometry) -> str | None:
    """Return what residuals of each layer cost more than keys and values, in a sentence; None where they are
    not larger."""
    vectors, entries = geometry.residual_checkpoint_bytes_per_token(spec.stride), geometry.full_bytes_per_token
    if spec.kind != "residual" or vectors <= entries:
        return None
    return (
        f"Residuals of this model take {vectors / entries:.1f} times the bytes of its keys and values, and a step on a "
        f"GPU copies them all before it projects them; leave checkpoint '{spec}' out, or use 'kv'."
    )


def price_of_replay(spec: CheckpointSpec, geometry: ModelGeometry, weights: int, tokens: int) -> str:
    """Return what a step costs that runs layers again over ``tokens``, in a sentence. weights: of all layers."""
    layers = len(geometry.layers)
    anchors = len(geometry.residual_anchors(layers if spec.kind == "tokens" else spec.stride))
    products = 2.0 * weights * tokens
    for layer in geometry.layers:
        seen = tokens / 2 if layer.window is None else min(tokens / 2, layer.window)
        products += 2 * geometry.attention_heads * (layer.key_dim + layer.value_dim) * tokens * seen
    again = products * (layers - anchors) / layers / FLOPS
    copied = geometry.full_bytes_per_token * tokens / HOST_BYTES
    return (
        f"Checkpoint '{spec}' runs {layers - anchors} of {layers} layers again over {tokens:,} tokens in every step: "
        f"{again:.2g} s by arithmetic on an H100, where copying keys and values takes {copied:.2g} s; use 'kv'."
    )
