"""Bit-by-bit comparison of logits finds a difference wherever a text is cut and in whichever row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvkeep_lab.bits import PADDING, greatest_difference, one_at_a_time
from torch import Tensor

TEXT = torch.arange(2, 302)[None]


class Echo:
    """A model whose logits are the tokens; ``spoil`` changes some: logits, tokens before them."""

    def __init__(self, spoil: Any = lambda logits, start: None) -> None:
        self.spoil = spoil

    def __call__(self, ids: Tensor, cache: list[Tensor], **given: Any) -> Any:
        start = sum(part.shape[1] for part in cache)
        cache.append(ids)
        if given:
            assert given["attention_mask"].shape == (2, start + ids.shape[1])
            assert given["position_ids"].shape == ids.shape
        logits = ids[..., None].bfloat16().repeat(1, 1, 3)
        self.spoil(logits, start)
        return SimpleNamespace(logits=logits)


def difference(spoil: Any) -> tuple[float, float]:
    reference = one_at_a_time(Echo(), TEXT, [])
    assert reference.shape == (300, 3)
    return greatest_difference(Echo(spoil), TEXT, reference, list)


def set_to(value: float, row: int, place: int) -> Any:
    """Spoil a logit of a batch at a place of its text."""

    def spoil(logits: Tensor, start: int) -> None:
        at = place - start
        if len(logits) == 2 and 0 <= at < logits.shape[1]:
            logits[row, at, 1] = value

    return spoil


def test_equal_logits_have_no_difference() -> None:
    assert difference(lambda logits, start: None) == (0.0, 0.0)


@pytest.mark.parametrize("place", [0, 150, 299])
@pytest.mark.parametrize("row", [0, 1])
def test_a_difference_in_any_logit_of_either_row_is_found(place: int, row: int) -> None:
    at = place + (PADDING if row == 0 else 0)
    assert difference(set_to(10_000.0, row, at))[1] > 9000
    assert difference(set_to(float("nan"), row, at)) == (0.0, float("inf"))


def test_padding_and_tokens_after_the_text_are_ignored() -> None:
    assert difference(set_to(10_000.0, 0, PADDING - 1)) == difference(set_to(10_000.0, 1, 300)) == (0.0, 0.0)


def test_a_difference_in_a_chunk_is_found() -> None:
    def spoil(logits: Tensor, start: int) -> None:
        if len(logits) == 1 and logits.shape[1] > 1:
            logits[0, -1] += 8.0

    apart = difference(spoil)
    assert apart[0] >= 8.0 and apart[1] == 0.0
