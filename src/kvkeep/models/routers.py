"""Routers of experts, which compute each row alone: torch chooses its products by the number of rows, and a token would
go to other experts in a larger batch.

The code of routers differs from family to family, so a router stays as it is. Its weight is replaced by one that
computes ``torch.nn.functional.linear`` itself (torch's ``__torch_function__``), and a mode of torch computes its
sigmoid. The softmax, the sums and the choice of torch are those of a single row for any number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvkeep.errors import trial
from kvkeep.models.packed import Blocks, Packed, multiplied
from kvkeep.native.library import library


class RouterWeight(nn.Parameter):
    """The weight of a router, (experts, hidden) bfloat16 or float32. Other functions than a product with rows of its
    dtype on the CPU see an ordinary parameter."""

    by_library = True
    """The library computes its products (:func:`~kvkeep.models.packed.row_independent`)."""
    packed: Packed | None = None
    """The same weight for the library, made with the first product."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute a function of torch that is given such a weight."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear and _computes(args, kwargs):
                rows, weight, *bias = args
                if weight.packed is None:
                    kind = "F32" if weight.dtype == torch.float32 else "BF16"
                    weight.packed = Packed(Blocks(kind, weight.detach().contiguous().view(torch.uint8)))
                return multiplied(weight.packed, rows, *bias)
            return func(*args, **(kwargs or {}))


def _computes(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    if kwargs or len(args) < 2 or not isinstance(args[1], RouterWeight) or library() is None:
        return False
    given, dtype = [one for one in args if one is not None], args[1].dtype
    return dtype in (torch.bfloat16, torch.float32) and all(one.dtype == dtype and one.is_cpu for one in given)


class RowSigmoid(TorchFunctionMode):
    """Computes the sigmoid of float32 by torch's ``exp``. torch's own sigmoid computes the last numbers of a tensor,
    or of a thread's part of it, in another way than the others, and their last bits differ."""

    used = False
    """Whether it has computed one."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute a function of torch."""
        if func in (torch.sigmoid, Tensor.sigmoid) and args and args[0].dtype == torch.float32:
            self.used = True
            return 1 / (1 + (-args[0]).exp())
        return func(*args, **(kwargs or {}))


class Routed:
    """The forward of a router, by :class:`RowSigmoid`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.has_sigmoid = False
        """Whether it has computed a sigmoid."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the router's own forward returns."""
        with RowSigmoid() as mode:
            found = type(self.module).forward(self.module, *args, **kwargs)
        self.has_sigmoid |= mode.used
        return found


@torch.no_grad()
def replace_routers(model: Any) -> None:
    """Let a model's routers compute each row alone. Their weights are replaced where a trial shows that the library
    then computes their products, and their forward where it has a sigmoid."""
    for module in [one for one in model.modules() if "Router" in type(one).__name__]:
        module.forward = routed = Routed(module)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
            continue
        module.weight = made = RouterWeight(weight.detach(), requires_grad=weight.requires_grad)
        needed = True
        for biases in ((), (torch.zeros(len(weight)),)):  # some are given the biases of the choice
            if made.packed is None:
                with trial("a router"):
                    module(torch.zeros(2, weight.shape[1], dtype=torch.bfloat16), *biases)
                    needed = routed.has_sigmoid
        if made.packed is None:
            module.weight = weight
        if not needed:
            del module.forward
