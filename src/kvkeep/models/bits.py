"""Tests whether a model's bits depend on the number of rows that it reads at the same time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvkeep.geometry import ModelGeometry
from kvkeep.models.packed import Packed
from kvkeep.native.library import library

TRIAL_ROWS = (2, 3, 7, 13)
"""Rows of a trial. Products of several rows work in other ways than those of one: in tiles, or with decoded weights."""


@torch.no_grad()
def row_independent(model: Any) -> bool:
    """Return whether a token's logits have the same bits in any batch as in a single row.

    If so, and if the kernel computes attention, a verifying pass, a chunk of a prompt and a batch have the bits of
    single tokens. Each model is tried once, on tokens without a past, and only if kernels compute all its products:
    torch chooses its products by shape, and a trial cannot cover all shapes. The result is never true for float32 on a
    CPU.
    """
    known: bool | None = getattr(model, "_kvkeep_row_independent", None)
    if known is None and not _by_kernels(model):
        known = model._kvkeep_row_independent = False
    if known is None:
        count = max(TRIAL_ROWS)
        vocabulary = ModelGeometry.from_config(model.config).vocab_size
        ids = torch.randint(0, vocabulary, (count, 1), generator=torch.Generator().manual_seed(3)).to(model.device)
        single = torch.cat([model(row[None], use_cache=False).logits for row in ids])
        known = all(torch.equal(model(ids[:rows], use_cache=False).logits, single[:rows]) for rows in TRIAL_ROWS)
        model._kvkeep_row_independent = known
    return known


def _by_kernels(model: Any) -> bool:
    """Return whether kernels multiply all matrices, as they do packed ones. Other parameters are only added or looked
    up."""
    if library() is None or model.device.type != "cpu":
        return False
    for module in model.modules():
        if isinstance(module, Packed):
            if not module.native:
                return False
        elif not isinstance(module, nn.Embedding) and any(one.ndim > 1 for one in module.parameters(recurse=False)):
            return False
    return True
