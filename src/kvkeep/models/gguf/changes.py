"""What llama.cpp's converter does to tensors, undone: the order of rows, norms, transposed matrices, experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Change:
    """How the tensors of a file become one of the model."""

    values: Callable[[Sequence[Tensor]], Tensor]
    """Returns the model's values, of those of the file's tensors, float32."""
    order: Callable[[int], Tensor] | None = None
    """Returns, for a number of rows, the file's row of each row of the model, if rows are all that change. None:
    values change, too."""
    parts: int = 1
    """The number of the file's tensors that form one of the model."""


def pairs(heads: int) -> Change:
    """Rotated pairs: llama.cpp turns elements 2i and 2i + 1 of a head, transformers i and i + half the head."""

    def order(rows: int) -> Tensor:
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()

    return Change(lambda stored: stored[0][order(len(stored[0]))], order)


def grouped(heads: int, kv_heads: int) -> Change:
    """Queries, keys and values in one matrix: the file has all queries, all keys, all values; the model has a key and a
    value after the queries that use them."""

    def order(rows: int) -> Tensor:
        size = rows // (heads + 2 * kv_heads)
        parts = torch.arange(rows).split([heads * size, kv_heads * size, kv_heads * size])
        return torch.cat([part.view(kv_heads, -1, size) for part in parts], 1).flatten()

    return Change(lambda stored: stored[0][order(len(stored[0]))], order)


AS_STORED = Change(lambda stored: stored[0], lambda rows: torch.arange(rows))
LESS_ONE = Change(lambda stored: stored[0] - 1.0)
"""Norms that multiply by one more than their weight; the file has the sum."""
TRANSPOSED = Change(lambda stored: stored[0].T.contiguous())
"""transformers' Conv1D has inputs before outputs."""
SHORT_CONVOLUTION = Change(lambda stored: stored[0][:, None])
"""(channels, kernel), with a dimension for groups in transformers."""
GATE_AND_UP = Change(lambda stored: torch.cat(tuple(stored), 1), parts=2)
"""Experts' gates and ups, (experts, inner, width) each, joined in one matrix of each expert."""
GATE_THEN_UP = Change(lambda stored: torch.cat(tuple(stored)), parts=2)
"""A gate and an up, (inner, width) each, joined in one matrix."""
EXPERTS_TRANSPOSED = Change(lambda stored: stored[0].transpose(1, 2).contiguous())
INTERLEAVED = Change(lambda stored: torch.stack(tuple(stored), -1).flatten(-2), parts=2)
"""Gates and ups of biases, each gate before its up."""
INTERLEAVED_TRANSPOSED = Change(
    lambda stored: torch.stack([one.transpose(1, 2) for one in stored], -1).flatten(-2).contiguous(), parts=2
)
"""The experts of gpt-oss: inputs before outputs, each gate before its up."""
