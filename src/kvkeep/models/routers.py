"""Routers of experts, which compute each row alone: torch chooses its products by the number of rows, and a token would
go to other experts in a larger batch.

The library runs a router (:class:`LibraryRouter`) if a trial shows that it chooses the same experts. The code of all
others stays as it is. Their weight is replaced by one that computes ``torch.nn.functional.linear`` itself (torch's
``__torch_function__``), and a mode of torch computes their sigmoid. The softmax, the sums and the choice of torch are
those of a single row for any number of rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvkeep.errors import trial
from kvkeep.models.packed import Blocks, Packed, PackedLinear, WithPointers, multiplied
from kvkeep.native.library import kernels, library
from kvkeep.native.structures import SIGMOID, SOFTMAX, KvRouter, address_of, array

_NAMES = re.compile("Router|Gate$")
"""What families call the classes of routers."""
_SCALES = ("routed_scaling_factor", "route_scale")
"""What they call the factor of weights."""
TRIAL_ROWS = 40
"""Rows for which the library and a router are compared."""
_WAYS = tuple(product((SOFTMAX, SIGMOID), (False, True), (1, 2)))
"""How a router may choose, as :class:`LibraryRouter` takes it: its scores, whether weights are normalised, and how
those of routers in bfloat16 are rounded."""


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


class LibraryRouter(WithPointers):
    """The forward of a router by the library."""

    def __init__(
        self, module: Any, scores: int, normalised: bool, rounded: int, group_scores: int, like: Sequence[Tensor]
    ) -> None:
        """scores: a KvScores. normalised: whether weights are divided by their sum. rounded: what is rounded where
        weights are bfloat16, 1: only these, 2: scores and each result. group_scores: how many scores make that of a
        group of experts, of which some are chosen first; 0: experts are chosen from all. like: what the module
        returns."""
        self.module, self.scores, self.normalised, self.group_scores = module, scores, normalised, group_scores
        self.rounded = rounded
        if (matrix := _matrix(module)) is None:
            raise TypeError("its weight is not the library's")
        self.matrix = matrix
        self.k, self.dtypes = like[2].shape[-1], [one.dtype for one in like]
        self.scale = float(next((getattr(module, name) for name in _SCALES if hasattr(module, name)), 1.0))
        bias = getattr(module, "bias", None)
        self.bias = None if bias is None else bias.detach().to(module.weight.dtype)
        choice = getattr(getattr(module, "moe_statics", module), "e_score_correction_bias", None)
        self.choice_bias = None if choice is None else choice.detach().float().flatten()
        self._given: Tensor | None = None  # what the mixture has for it

    @cached_property
    def struct(self) -> KvRouter:
        """The router as a struct for the kernels. Its tensors must outlive it."""
        struct = KvRouter(
            weight=self.matrix.struct,
            bias=array(self.bias),
            choice_bias=array(self.choice_bias),
            scores=self.scores,
            k=self.k,
            groups=self.module.num_group if self.group_scores else 1,
            taken_groups=self.module.topk_group if self.group_scores else 1,
            group_scores=self.group_scores or 1,
            normalised=self.normalised,
            rounded=self.rounded if self.dtypes[1] == torch.bfloat16 else 0,
            scale=self.scale,
        )
        struct.kept = [*self.matrix.buffers(), self.bias, self.choice_bias]
        return struct

    def __call__(self, hidden_states: Tensor, *biases: Tensor) -> tuple[Tensor, ...]:
        """Return what the router's own forward returns: products (tokens, experts), and the weights and numbers of the
        chosen experts (tokens, k), those of the greatest scores first. biases: those of the choice, (experts,), where
        the mixture has them."""
        x = hidden_states.reshape(-1, self.matrix.in_features)
        if x.dtype != torch.bfloat16 or not x.is_cpu or (torch.is_grad_enabled() and x.requires_grad):
            return type(self.module).forward(self.module, hidden_states, *biases)
        if biases and biases[0] is not self._given:
            self._given, self.choice_bias = biases[0], biases[0].detach().float().contiguous()
            self.__dict__.pop("struct", None)
        products, weights = torch.empty(len(x), self.matrix.out_features), torch.empty(len(x), self.k)
        chosen = torch.empty(len(x), self.k, dtype=torch.int64)
        kernels().kvkeep_route(address_of(self.struct), x.contiguous(), products, weights, chosen)
        return tuple(one.to(dtype) for one, dtype in zip((products, weights, chosen), self.dtypes, strict=True))


@torch.no_grad()
def replace_routers(model: Any) -> None:
    """Let a model's routers compute each row alone: by the library, where a trial shows that it chooses as they do. The
    weights of others are replaced where the library then computes their products, and their forward where it has a
    sigmoid."""
    for module in [one for one in model.modules() if _NAMES.search(type(one).__name__)]:
        module.forward = routed = Routed(module)
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 2:
            module.weight = RouterWeight(weight.detach(), requires_grad=weight.requires_grad)
            experts, hidden = weight.shape
        elif (matrix := _matrix(module)) is not None:
            experts, hidden = matrix.out_features, matrix.in_features
        else:
            continue
        x = torch.randn(TRIAL_ROWS, hidden, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        # Of large rows few experts have high scores, of small ones all have nearly the same.
        x = x * 2.0 ** -(torch.arange(TRIAL_ROWS) % 8)[:, None].to(torch.bfloat16)
        # Some are given the biases of the choice; small ones, by which one of several experts with the same score is
        # chosen.
        biases = torch.arange(experts) * 2.0**-18
        for given in ((x,), (x, biases), (x[None], biases)):
            with trial("a router"):
                wanted = module(*given)
                if (router := _by_library(module, given, wanted)) is not None:
                    module.forward = router
                elif not routed.has_sigmoid:
                    del module.forward
                break
        if isinstance(weight, nn.Parameter) and _matrix(module) is None:
            module.weight = weight


def _matrix(module: Any) -> Packed | None:
    """Return the matrix of a router: its weight, once the library has multiplied by it, or its only layer."""
    if isinstance(weight := getattr(module, "weight", None), RouterWeight):
        return weight.packed
    inner = [one for one in module.children() if isinstance(one, PackedLinear)]
    return inner[0] if len(inner) == 1 and inner[0].plain else None


def _by_library(module: Any, given: Sequence[Tensor], wanted: Sequence[Tensor]) -> LibraryRouter | None:
    """Return a router that chooses what ``module`` does for what it is ``given``; None: the library has none. wanted:
    what the module returns."""
    grouped = (getattr(module, "num_group", None) or 1) > 1
    for (scores, normalised, rounded), group_scores in product(_WAYS, (1, 2) if grouped else (0,)):
        if rounded == 2 and wanted[1].dtype != torch.bfloat16:
            continue
        with trial("a router's choice"):
            router = LibraryRouter(module, scores, normalised, rounded, group_scores, wanted)
            if _same_choice(router(*given), wanted):
                return router
    return None


def _same_choice(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Return whether routers choose the same experts, up to rounding. Of experts with the same product, either may be
    chosen."""

    def compared(products: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        return products, products.gather(1, chosen).sort().values, weights.sort().values

    pairs = zip(compared(*found), compared(*wanted), strict=True)
    return all(one.shape == other.shape and torch.allclose(one, other, rtol=0.01, atol=1e-6) for one, other in pairs)
