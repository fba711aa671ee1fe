"""``recall_attend``: attention over residuals, with keys and values in registers where possible.

Two implementations: :func:`formed_attend`, the reference, forms the keys and values of a page in memory; the kernel of
:mod:`kvkeep.attention.triton_recall` forms them in registers. The kernel is used on a GPU with Triton, for supported
shapes, after its result agreed with the reference on that machine.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvkeep.models.projection import Projection
from kvkeep.step.plan import Segment
from kvkeep.step.torch import partial

log = logging.getLogger(__name__)

DEVICES = ("cuda",)
"""Where the kernel runs; Triton's interpreter also runs it on the CPU, which tests use."""

ROWS = 128
"""Rows of queries (of all heads of a group) up to which a program has room for them. More, as a prompt's chunk has,
share one page's keys and values better when these are written out."""


def recall_attend(
    query: Tensor,
    hidden: Tensor,
    projection: Projection,
    angles: tuple[Tensor, Tensor],
    scaling: float,
    mask: Tensor | None = None,
    holding: Callable[..., AbstractContextManager[None]] = lambda *tensors: nullcontext(),
) -> tuple[Tensor, Tensor]:
    """Return attention of ``query`` over the entries that ``hidden`` stands for, and the log-sum-exp of its scores.

    query: (batch, heads, queries, head_dim), rotated. hidden: (batch, entries, hidden_size), the residuals entering the
    layer. angles: cosines and sines of their positions, (batch or 1, entries, head_dim) each. scaling: of the scores.
    mask: as :class:`~kvkeep.attention.Segment` has it. holding: a context that counts keys and values
    formed in memory. Returns (batch, heads, queries, head_dim) and (batch, heads, queries), both float32, to be
    merged with other parts by :func:`~kvkeep.attention.attend`; zeros and -inf for a query that sees no entry.
    """
    if fused(query, hidden, projection):
        return _kernel()(query, hidden, projection, angles, scaling, mask)
    return formed_attend(query, hidden, projection, angles, scaling, mask, holding)


def formed_attend(
    query: Tensor,
    hidden: Tensor,
    projection: Projection,
    angles: tuple[Tensor, Tensor],
    scaling: float,
    mask: Tensor | None = None,
    holding: Callable[..., AbstractContextManager[None]] = lambda *tensors: nullcontext(),
) -> tuple[Tensor, Tensor]:
    """The same in plain tensor operations: the reference, and the fallback."""
    keys, values = projection.form(hidden, angles)
    with holding(keys, values):
        return partial(query, Segment(keys, values, mask), scaling)


def available(device: torch.device) -> bool:
    """Return whether there is a kernel for ``device``: NVIDIA from Ampere on, for bfloat16."""
    return device.type in DEVICES and _kernel() is not None and _capable(device)


def fused(query: Tensor, hidden: Tensor, projection: Projection) -> bool:
    """Return whether the kernel is used for such tensors."""
    kv_heads, dim = projection.kv_heads, projection.head_dim
    rows = query.shape[1] // kv_heads * query.shape[2]
    tensors = (query, hidden, projection.norm, projection.key, projection.value)
    return (
        rows <= ROWS
        and dim % 2 == 0
        and dim <= 256
        and all(tensor.device == query.device for tensor in tensors)
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(tensor.dtype == query.dtype for tensor in (hidden, projection.key, projection.value))
        and projection.key.is_contiguous()
        and projection.value.is_contiguous()
        and available(query.device)
        and _agrees(
            query.device,
            query.dtype,
            hidden.shape[2],
            kv_heads,
            dim,
            1 << (max(16, rows) - 1).bit_length(),
            projection.key_bias is not None,
            projection.value_bias is not None,
            projection.key_norm is not None,
        )
    )


@cache
def _kernel() -> Any:
    """Return the kernel's launcher, None where Triton is not installed or does not work."""
    try:
        return importlib.import_module("kvkeep.attention.triton_recall").launch
    except (ImportError, RuntimeError) as error:
        log.debug("no kernel for recall: %s", error)
        return None


@cache
def _capable(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _agrees(
    device: torch.device,
    dtype: torch.dtype,
    hidden_size: int,
    kv_heads: int,
    dim: int,
    rows: int,
    key_bias: bool,
    value_bias: bool,
    key_norm: bool,
) -> bool:
    """Return whether the kernel agrees with the reference on random tensors of this shape; tried once."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    width, entries = kv_heads * dim, 80
    projection = Projection(
        random(hidden_size),
        0.5,
        1e-6,
        random(width, hidden_size, scale=hidden_size**-0.5),
        random(width, hidden_size, scale=hidden_size**-0.5),
        dim,
        random(width) if key_bias else None,
        random(width) if value_bias else None,
        random(dim) if key_norm else None,
        1e-6,
    )
    turns = torch.rand(1, entries, dim // 2, generator=generator).repeat(1, 1, 2).to(device) * 6.28
    seen = torch.rand(1, 1, 1, entries, generator=generator).to(device) > 0.3
    given = (
        random(1, kv_heads * rows, 1, dim),
        random(1, entries, hidden_size),
        projection,
        (turns.cos().to(dtype), turns.sin().to(dtype)),
        dim**-0.5,
        seen,
    )
    try:
        pairs = zip(_kernel()(*given), formed_attend(*given), strict=True)
        agrees = all(close(mine, reference, dtype) for mine, reference in pairs)
    except Exception as error:  # any error of compiler or driver: the reference is used
        log.debug("the kernel for recall does not run on %s: %s", device, error)
        return False
    if not agrees:
        log.warning("The kernel for recall gives other numbers than plain operations on %s; it is not used.", device)
    return agrees


def close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Equal up to the rounding of ``dtype``, relative to the largest."""
    tolerance = {torch.float32: 1e-4, torch.float16: 5e-3}.get(dtype, 4e-2)
    return bool(((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1.0)).item())
