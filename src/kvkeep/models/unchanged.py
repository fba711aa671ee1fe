"""Whether modules that the library runs are as they were when it was compared with them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn

from kvkeep.models.norms import FusedNorm, Weights


class Unchanged:
    """What replaced forwards assume: their modules have the parts, weights and factors that they had, and none of these
    parts has a hook, which only a call of the part would run."""

    def __init__(self, modules: Sequence[nn.Module], norms: Sequence[FusedNorm] = ()) -> None:
        parts = [part for one in modules for part in one.modules()]
        inner = [part for part in parts if all(part is not one for one in modules)]
        self._hooks = [hooks for part in inner for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        # Adapters replace modules.
        self._holders = [part._modules for part in parts if part._modules]
        self._before = self._parts()
        # Modules and not their dictionaries, which a copy of a model does not keep.
        self._numbers = [(part, name) for part in parts for name, one in vars(part).items() if type(one) is float]
        self._stated = self._factors()
        self._weights = Weights(norms)

    def _parts(self) -> list[Any]:
        return [*chain.from_iterable([parts.values() for parts in self._holders])]

    def _factors(self) -> list[Any]:
        """Return all numbers with a fraction, as scales of scores and of outputs."""
        return [part.__dict__.get(name) for part, name in self._numbers]

    def __call__(self) -> bool:
        """Return whether all of this is so."""
        same = self._parts() == self._before and self._factors() == self._stated
        return same and not any(self._hooks) and self._weights.hold()
