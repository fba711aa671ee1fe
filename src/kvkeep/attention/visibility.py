"""Which queries see which past slots, as small masks made piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor


def past_mask(
    first_query: int,
    queries: int,
    start: int,
    stop: int,
    *,
    visible: Tensor | None,
    device: torch.device,
    window: int | None = None,
) -> Tensor | None:
    """Return the mask of queries at slots ``first_query``.. over past slots ``start``..``stop``, or None if all
    is seen. ``visible``: (batch, slots) bool, False for padding; ``window``: a sliding layer's width: a query at
    slot q sees slots above q - window.

    The result is (batch or 1, 1, queries, stop - start) bool.
    """
    mask: Tensor | None = None
    if visible is not None:
        mask = visible[:, None, None, start:stop].expand(-1, 1, queries, -1)
    if window is not None and start <= first_query + queries - 1 - window:
        query_slots = torch.arange(first_query, first_query + queries, device=device)
        near = torch.arange(start, stop, device=device)[None, :] > query_slots[:, None] - window
        mask = near[None, None] if mask is None else mask & near
    return mask


def new_mask(queries: int, entries: int, device: torch.device) -> Tensor:
    """Return the causal mask of the last ``queries`` of ``entries`` new tokens over all of them, (1, 1, q, n)."""
    rows = torch.arange(entries - queries, entries, device=device)
    return (torch.arange(entries, device=device)[None, :] <= rows[:, None])[None, None]
