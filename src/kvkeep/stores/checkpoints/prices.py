"""What recall costs on a GPU where entries are copied or rebuilt. This is arithmetic; nothing of it was measured."""

from __future__ import annotations

import math

from kvkeep.budget import LONGEST_CHUNK
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.rows import up
from kvkeep.stores.checkpoints.spec import CheckpointSpec

FLOPS = 600e12
"""Operations in a second of products in bfloat16 on an H100."""
HOST_BYTES = 50e9
"""Bytes in a second from pinned host memory."""
LONG = 8192
"""The number of tokens from which on running layers again has a price worth a warning."""
LARGEST_CHUNK = 8192
"""The most tokens of a chunk, whose hidden states are in the device's memory."""


def longest_chunk(geometry: ModelGeometry) -> int:
    """Return how many tokens of a prompt an exact cache with a staged checkpoint reads at a time, at most. Each chunk
    copies all evicted entries, some of them while it attends to others. It is so long that attention to an entry takes
    as long as copying it, whatever their number."""
    if geometry.dtype_bytes > 2:  # products of float32 take longer than copies in any chunk
        return LONGEST_CHUNK
    widths = [layer.key_dim + layer.value_dim for layer in geometry.full_layers]
    products = 2 * geometry.attention_heads * sum(widths)  # of one query and one entry in each layer
    tokens = geometry.full_bytes_per_token * FLOPS / (products * HOST_BYTES)
    return min(max(up(math.ceil(tokens), LONGEST_CHUNK), LONGEST_CHUNK), LARGEST_CHUNK)


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
