"""Tensors that can be written later, even if made under ``torch.inference_mode``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` without gradients and outside ``torch.inference_mode``."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run


def writable(tensor: Tensor) -> Tensor:
    """Return ``tensor`` without its graph, or a copy if it was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()
