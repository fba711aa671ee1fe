"""The weights that make keys and values of a residual, for layers laid out like Llama's.

:class:`~kvkeep.models.adapter.Adapter` re-implements no layer and runs the model's own modules. A kernel cannot run
modules: it needs weights. :func:`read` finds them by the names that most families share, and the adapter uses them only
if they reproduce the modules' output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True)
class Projection:
    """K = R_p RMSNorm(h) W_k, V = RMSNorm(h) W_v (KV-Direct, Eqs. 13-14), as tensors of the model, not copies.

    norm: (hidden,), to which ``offset`` is added (Gemma's norms multiply with 1 + w). eps: of the norm. key, value:
    (kv_heads * head_dim, hidden). key_bias, value_bias: (kv_heads * head_dim,), as Qwen 2 has. key_norm: (head_dim,),
    ``offset`` added, the norm of each key as Qwen 3 has, with ``key_eps``.
    """

    norm: Tensor
    offset: float
    eps: float
    key: Tensor
    value: Tensor
    head_dim: int
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    key_norm: Tensor | None = None
    key_eps: float = 0.0

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.key.shape[0] // self.head_dim

    def form(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values of residuals ``hidden`` (batch, n, hidden_size): (batch, kv_heads, n, head_dim) each.

        angles: cosines and sines of the positions, (batch or 1, n, head_dim) each; the halves of a head turn together.
        """
        normed = rms_normed(hidden, self.norm, self.offset, self.eps)
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        keys = linear(normed, self.key, self.key_bias).view(shape)
        values = linear(normed, self.value, self.value_bias).view(shape).transpose(1, 2)
        if self.key_norm is not None:
            keys = rms_normed(keys, self.key_norm, self.offset, self.key_eps)
        keys = keys.transpose(1, 2)
        cos, sin = (part.unsqueeze(1) for part in angles)
        low, high = keys.chunk(2, -1)
        return keys * cos + torch.cat([-high, low], -1) * sin, values


def rms_normed(rows: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    """Return RMSNorm of ``rows``, weighted by ``weight + offset``, summed in float32, in their dtype."""
    wide = rows.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.float() + offset)).to(rows.dtype)


def read(layer: Any, offset: float) -> Projection | None:
    """Return the weights of a decoder layer, None if its layout or computation differs."""
    attention = getattr(layer, "self_attn", None)
    norm = getattr(layer, "input_layernorm", None)
    key, value = getattr(attention, "k_proj", None), getattr(attention, "v_proj", None)
    if type(key) is not nn.Linear or type(value) is not nn.Linear or _eps(norm) is None:
        return None
    key_norm = getattr(attention, "k_norm", None)
    if key_norm is not None and _eps(key_norm) is None:
        return None
    return Projection(
        norm.weight,  # type: ignore[union-attr]
        offset,
        _eps(norm) or 0.0,
        key.weight,
        value.weight,
        attention.head_dim,  # type: ignore[union-attr]
        key.bias,
        value.bias,
        None if key_norm is None else key_norm.weight,
        _eps(key_norm) or 0.0,
    )


def _eps(norm: Any) -> float | None:
    """Return the epsilon of an RMSNorm of transformers, None for another module."""
    if getattr(norm, "weight", None) is None or getattr(norm, "bias", None) is not None:
        return None
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
