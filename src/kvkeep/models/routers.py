"""Routers of experts, whose products the native library computes: torch chooses its product by the number of rows, and
a token would go to other experts in a larger batch.

The code of routers differs from family to family, so a router stays as it is, and only its weight is replaced, by one
that computes ``torch.nn.functional.linear`` itself (torch's ``__torch_function__``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kvkeep.errors import trial
from kvkeep.models.packed import Blocks, Packed, multiplied
from kvkeep.native.library import library


class RouterWeight(nn.Parameter):
    """The weight of a router, (experts, hidden) bfloat16. Other functions than a product of bfloat16 rows on the CPU
    see an ordinary parameter."""

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
                    weight.packed = Packed(Blocks("BF16", weight.detach().contiguous().view(torch.uint8)))
                return multiplied(weight.packed, rows, *bias)
            return func(*args, **(kwargs or {}))


def _computes(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    if kwargs or len(args) < 2 or not isinstance(args[1], RouterWeight):
        return False
    given = [one for one in args if one is not None]
    return library() is not None and all(one.dtype == torch.bfloat16 and one.is_cpu for one in given)


@torch.no_grad()
def replace_routers(model: Any) -> None:
    """Replace the weights of a model's routers, where a trial shows that the library then computes their products; some
    multiply in float32."""
    for module in [one for one in model.modules() if "Router" in type(one).__name__]:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
            continue
        module.weight = made = RouterWeight(weight.detach(), requires_grad=weight.requires_grad)
        with trial("a router"):  # it may want more, behind the product
            module(torch.zeros(2, weight.shape[1], dtype=torch.bfloat16))
        if made.packed is None:
            module.weight = weight
