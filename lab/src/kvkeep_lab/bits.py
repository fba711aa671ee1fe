"""Compares logits bit by bit between a text read one token at a time through the unbounded cache, and other ways of
reading it.

A verifying pass, a chunk of a prompt, a recall from a checkpoint and a batch with padding each read several tokens or
texts at once. If products and attention are independent of that (:mod:`kvkeep.models.packed`), every logit of an exact
method is the same number.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SIZES = (1, 2, 3, 5, 16, 33, 100, 256)
"""Possible numbers of tokens in a chunk, drawn at random."""
PADDING = 37
"""Extra tokens of the other row of a batch."""


@torch.inference_mode()
def one_at_a_time(model: Any, text: Tensor, cache: Any) -> Tensor:
    """Return all logits of ``text`` (1, n), read token by token: (n, vocabulary) in the model's dtype."""
    return torch.cat([model(one, cache=cache).logits[0] for one in text.split(1, 1)])


@torch.inference_mode()
def greatest_difference(
    model: Any, text: Tensor, reference: Tensor, cache: Callable[[], Any], seed: int = 0
) -> tuple[float, float]:
    """Return the largest difference of any logit of ``text`` (1, n) from ``reference``. The text is read in chunks of
    random sizes, and in a batch as a padded row and as the beginning of a longer row, each with a new ``cache``. The
    result is infinite if a logit is not a number."""
    chance, device = random.Random(seed), text.device
    longer = torch.cat([text, text[:, :PADDING].repeat(1, -(-PADDING // text.shape[1]))[:, :PADDING]], 1)
    rows = torch.cat([torch.nn.functional.pad(text, (PADDING, 0)), longer])
    mask = torch.ones_like(rows)
    mask[0, :PADDING] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    worst = []
    for ids, padding_mask, padding in ((text, None, (0,)), (rows, mask, (PADDING, 0))):
        past, start, parts = cache(), 0, []
        while start < ids.shape[1]:
            stop = min(start + chance.choice(SIZES), ids.shape[1])
            given = (
                {}
                if padding_mask is None
                else {"attention_mask": padding_mask[:, :stop], "position_ids": positions[:, start:stop]}
            )
            parts.append(model(ids[:, start:stop].to(device), cache=past, **given).logits)
            start = stop
        logits = torch.cat(parts, 1)
        found = torch.stack([row[first : first + len(reference)] for row, first in zip(logits, padding, strict=True)])
        apart = (found.float() - reference.float()).abs().masked_fill(found == reference, 0.0)
        worst.append(float(apart.nan_to_num(nan=float("inf")).max()))
    return worst[0], worst[1]
