"""Figures that several analyses take."""

from __future__ import annotations

import torch
from torch import Tensor


def effective_rank(energies: Tensor, share: float) -> Tensor:
    """Return how many of the ``energies`` (..., modes), falling, it takes to hold a ``share`` of their sum (KV-Direct,
    Eqs. 19-20): (...) float32."""
    total = energies.double().cumsum(-1)
    return (total < share * total[..., -1:]).sum(-1).float() + 1


def rank_correlation(a: Tensor, b: Tensor) -> float | None:
    """Return Spearman's correlation of two vectors, ties at their mean rank; None where there is none."""
    if len(a) < 3 or a.unique().numel() < 2 or b.unique().numel() < 2:
        return None
    return float(torch.corrcoef(torch.stack([_ranks(a), _ranks(b)]))[0, 1])


def _ranks(values: Tensor) -> Tensor:
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[places]
