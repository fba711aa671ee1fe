"""What the planner chooses between: every method that is known by name, with the kinds and places it can have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvkeep.contracts.exactness import Exactness
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.places import PLACES
from kvkeep.policies.methods import Method, names, resolve

SHARES = (0.5, 0.25, 0.125, 0.0625)
"""Budgets to plan for beside the largest that fits, as shares of the context."""

VARIANTS = {"quantized": ("quantized:8", "quantized:4", "quantized:2")}
"""Methods that are planned with parameters of their own, in place of their name alone."""

PREFERRED = ("full", "static", "paged", "kv-direct", "snapkv+verified")
"""The order in which ties are broken; others follow in the order of the registry."""


@dataclass(frozen=True)
class Candidate:
    """One cache that could be asked for: a method, and where it has checkpoints, their kind and place."""

    spec: str
    checkpoint: str | None = None
    where: str | None = None

    @cached_property
    def method(self) -> Method:
        """The method."""
        return resolve(self.spec)

    @property
    def exactness(self) -> Exactness:
        """What the method promises."""
        return self.method.exactness

    @property
    def keeps_all(self) -> bool:
        """Whether everything stays resident."""
        return self.method.selector.keeps_all

    @property
    def foreign(self) -> bool:
        """Whether a part of the method is of another package, or of a script."""
        parts = (self.method.selector, self.method.fate, self.method.recall)
        return not all(type(part).__module__.startswith("kvkeep.") for part in parts)

    @property
    def stride(self) -> int:
        """Layers for each residual kept; 0 for entries."""
        kind, _, stride = (self.checkpoint or "kv").partition(":")
        return {"kv": 0, "tokens": 10**6}.get(kind, int(stride or 1))

    def options(self, budget: str | int | None) -> dict[str, Any]:
        """Return the options of a :class:`~kvkeep.cache.KeepCache` with this budget."""
        return {"budget": budget, "checkpoint": self.checkpoint, "where": self.where}

    def __str__(self) -> str:
        return self.spec if self.checkpoint is None else f"{self.spec} {self.checkpoint}@{self.where}"


def specs() -> list[str]:
    """Return the methods to plan for, those first that win ties."""
    listed = [spec for name in names() if _planned(name) for spec in VARIANTS.get(name, (name,))]
    return sorted(listed, key=lambda spec: PREFERRED.index(spec) if spec in PREFERRED else len(PREFERRED))


def _planned(name: str) -> bool:
    """Return whether a method is one to plan for: not one that reads a text twice, and then is as others, nor one whose
    bytes do not follow from the geometry."""
    method = resolve(name)
    return method.reading is None and method.fate.predictable


def candidates(geometry: ModelGeometry, *, exact: bool = False) -> Iterator[Candidate]:
    """Yield what could be asked for; ``exact``: exact methods only. A residual's strides are 1 and a quarter of the
    layers, where the model keeps entries in more than one."""
    stride = len(geometry.layers) // 4
    kinds = ["kv", "residual", *([f"residual:{stride}"] if stride > 1 else []), "tokens"]
    for spec in specs():
        method = resolve(spec)
        if exact and method.exactness is not Exactness.EXACT:
            continue
        if not method.checkpoints:
            yield Candidate(spec)
            continue
        for kind in kinds:
            if method.recall.reads_single and kind not in ("kv", "residual"):
                continue
            for where in PLACES[:1] if kind == "tokens" else PLACES:
                yield Candidate(spec, kind, where)
