"""Norms by the library: the forward of an RMSNorm or a LayerNorm module is replaced where a trial shows that the kernel
agrees."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from itertools import product
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from kvkeep.models.packed import WithPointers
from kvkeep.native.library import kernels
from kvkeep.native.structures import KvNorm, address_of, array

_UNNAMED_EPS = 1e-5
"""The epsilon of a norm that has no attribute for it (OLMo)."""


class FusedNorm(WithPointers):
    """The forward of a norm by the kernel. offset: what is added to the weights. centred: whether it subtracts the mean
    (LayerNorm). width: of its rows."""

    def __init__(self, norm: Any, offset: float, centred: bool, width: int) -> None:
        self.norm, self.offset, self.centred, self._width = norm, offset, centred, width
        self.names = [name for name in ("weight", "bias") if norm._parameters.get(name) is not None]
        """The module's parameters."""
        self.weight, *added = self._stated()
        """The factors, (width,) float32."""
        self.bias = added[0] if added else None
        """What is added, the same; or None."""
        self.eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", _UNNAMED_EPS)))
        self._weights = Weights([self])

    def _stated(self) -> list[Tensor]:
        if "weight" not in self.names:
            return [torch.ones(self._width)]
        weight, *added = (getattr(self.norm, name).detach().float() for name in self.names)
        return [weight + self.offset, *added]

    def holds(self) -> bool:
        """Return whether :attr:`weight` and :attr:`bias` are those of the module's parameters."""
        known = [self.weight] if self.bias is None else [self.weight, self.bias]
        return not self.names or all(map(torch.equal, self._stated(), known))

    @cached_property
    def struct(self) -> KvNorm:
        """The norm as a struct for the kernels. Its tensors must outlive it."""
        return KvNorm(array(self.weight), array(self.bias), self.centred, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of ``x``, (..., width)."""
        if not (ours(x) and self._weights.hold() and x.shape[-1] == self._width):
            return type(self.norm).forward(self.norm, x)
        x = x.contiguous()
        out = torch.empty_like(x)
        kernels().kvkeep_norm(address_of(self.struct), x, out)
        return out


class Weights:
    """The weights of some fused norms. Every step compares them, most often with those of the step before."""

    def __init__(self, norms: Sequence[FusedNorm]) -> None:
        self._norms, self._places = norms, [(one.norm._parameters, name) for one in norms for name in one.names]
        self._known: Sequence[Any] = [None]  # the parameters that hold
        self._tracked: Sequence[Tensor] = ()  # those that have a version
        self._state: Sequence[int] = ()

    def hold(self) -> bool:
        """Return whether each norm has the parameters of its module. Changes of ``parameter.data`` in place leave no
        trace."""
        now: list[Any] = [parameters.get(name) for parameters, name in self._places]
        if len(now) == len(self._known) and all(map(is_, now, self._known)) and self._state == self._seen():
            return True
        self._known = [None]
        if any(one is None for one in now) or not all(one.holds() for one in self._norms):
            return False
        self._tracked = [one for one in now if not one.is_inference()]
        self._known = now
        self._state = self._seen()
        return True

    def _seen(self) -> list[int]:
        return [*map(_VERSION, self._tracked), *map(Tensor.data_ptr, self._known)]


_VERSION = attrgetter("_version")


@torch.no_grad()
def fuse_norm(norm: Any, width: int | None = None) -> None:
    """Replace the forward of a norm by the kernel, where they agree. width: of its rows, if the module does not state
    it. Raises AttributeError, TypeError or RuntimeError for a module of another kind."""
    if [*inspect.signature(type(norm).forward).parameters][2:]:  # a norm with a gate
        return
    if any(one.ndim != 1 for one in norm.parameters(recurse=False)):
        return
    if norm._parameters.get("weight") is not None:
        width = norm.weight.shape[-1]
    elif hasattr(norm, "normalized_shape"):
        (width,) = norm.normalized_shape
    if width is None:
        raise TypeError("its width is not known")
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    x = (x * torch.tensor([1, 1, 2**-8, 1])[:, None] + torch.tensor([0, 0, 0, 1])[:, None]).to(torch.bfloat16)
    if (wanted := type(norm).forward(norm, x)).dtype != x.dtype:
        return
    for centred, offset in product((False, True), (0.0, 1.0)):
        fused = FusedNorm(norm, offset, centred, width)
        size = wanted.float().abs() + (0 if fused.bias is None else fused.bias.abs())
        if bool(((fused(x) - wanted).float().abs() <= 0.02 * size + 1e-5).all()):
            norm.forward = fused
            return


def ours(x: Tensor) -> bool:
    """Return whether the library computes with ``x``: bfloat16 on the CPU, without a gradient."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not (torch.is_grad_enabled() and x.requires_grad)
