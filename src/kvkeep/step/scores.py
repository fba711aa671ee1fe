"""Scores of attention: products of queries and keys times a factor, which some models cap (Gemma 2)."""

from __future__ import annotations

from typing import Self

from torch import Tensor

CAP = "attn_logit_softcapping"
"""What transformers calls the cap of an attention module, which has None without one."""


class Scaling(float):
    """What products of queries and keys are multiplied by, and the cap of the scores that this gives."""

    cap: float
    """Scores become cap * tanh(score / cap); 0: they stay as they are."""

    def __new__(cls, factor: float, cap: float | None = None) -> Self:
        """cap: None means none."""
        made = super().__new__(cls, factor)
        made.cap = cap or 0.0
        return made

    def __rmul__(self, times: float) -> Self:
        """Return what gives so many times these scores."""
        return type(self)(times * float(self), times * self.cap)


def cap_of(scaling: float) -> float:
    """Return the cap of scores; 0: they have none."""
    return scaling.cap if isinstance(scaling, Scaling) else 0.0


def scores_of(products: Tensor, scaling: float) -> Tensor:
    """Return the scores of ``products``, float32, which are overwritten."""
    found = products.mul_(scaling)
    return found.div_(cap).tanh_() * cap if (cap := cap_of(scaling)) else found
