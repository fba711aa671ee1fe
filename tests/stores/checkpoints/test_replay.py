"""Residuals on their way up: a layer run over past tokens a page at a time attends as it did when they came."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvkeep.stores.checkpoints.replay import _Scratch


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("page", [1, 4, 20])
def test_pages_attend_as_the_whole_text_does(window: int | None, padding: int, page: int) -> None:
    """Causally, within a layer's own window, and not to padding."""
    rows, heads, slots, generator = 2, 2, 20, torch.Generator().manual_seed(0)
    query = torch.randn(rows, 2 * heads, slots, 8, generator=generator)
    key, value = (torch.randn(rows, heads, slots, 8, generator=generator) for _ in range(2))
    visible = torch.ones(rows, slots, dtype=torch.bool)
    visible[1, :padding] = False
    scratch, outputs = _Scratch(slots, visible if padding else None, window), []
    for low in range(0, slots, page):
        own = [part[:, :, low : low + page] for part in (query, key, value)]
        scratch.update(*own[1:])
        outputs.append(scratch.attend(SimpleNamespace(), *own, None, 0.4))
    at = torch.arange(slots)
    seen = (at <= at[:, None]) & visible[:, None, None, :]
    if window is not None:
        seen = seen & (at > at[:, None] - window)
    scores = query.double() @ key.double().repeat_interleave(2, 1).transpose(2, 3) * 0.4
    expected = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value.double().repeat_interleave(2, 1)
    real = visible[:, None, :, None].expand_as(expected)
    torch.testing.assert_close(torch.cat(outputs, 2).double()[real], expected[real], atol=1e-5, rtol=1e-5)
