"""What the planner chooses between: every method worth planning, with the kinds and places it can have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.places import PLACES
from kvkeep.policies.methods import resolve
from kvkeep.policies.request import Exactness

SHARES = (0.5, 0.25, 0.125, 0.0625)
"""Budgets to plan for beside the largest that fits, as shares of the context."""


@dataclass(frozen=True)
class Family:
    """How a method's layers work, which is what its costs follow from. layer: the kind of layer, as machines name their
    overheads. keeps: everything stays resident. fate: "", "checkpoint", "quantize", "lowrank" or "verified". watches:
    queries of a chunk whose scores are asked for (None: all)."""

    method: str
    layer: str
    keeps: bool = False
    fate: str = ""
    bits: int = 0
    rank: int = 0
    watches: int | None = 0


FAMILIES = (
    Family("full", "full", keeps=True),
    Family("static", "full", keeps=True),
    Family("paged", "paged", keeps=True),
    Family("kv-direct", "kv-direct", fate="checkpoint"),
    Family("snapkv+verified", "watched", fate="verified", watches=32),
    Family("quantized:8", "coded", fate="quantize", bits=8),
    Family("quantized:4", "coded", fate="quantize", bits=4),
    Family("quantized:2", "coded", fate="quantize", bits=2),
    Family("window", "selected"),
    Family("streaming-llm", "selected"),
    Family("h2o", "watched", watches=None),
    Family("snapkv", "watched", watches=32),
    Family("pyramidkv", "watched", watches=32),
    Family("tova", "watched", watches=1),
    Family("lowrank:32", "lowrank", fate="lowrank", rank=32),
)
"""In the order in which ties are told. A method that this version does not have is left out."""


@dataclass(frozen=True)
class Candidate:
    """One cache that could be asked for: a method, and where it has checkpoints, their kind and place."""

    family: Family
    exactness: str
    checkpoint: str | None = None
    where: str | None = None

    @property
    def method(self) -> str:
        """The method as commands take it."""
        return self.family.method

    @property
    def stride(self) -> int:
        """Layers for each residual kept; 0 for entries."""
        kind, _, stride = (self.checkpoint or "kv").partition(":")
        return {"kv": 0, "tokens": 10**6}.get(kind, int(stride or 1))

    def options(self, budget: str | int | None) -> dict[str, Any]:
        """Return the options of a :class:`~kvkeep.cache.KeepCache` with this budget."""
        return {"budget": budget, "checkpoint": self.checkpoint, "where": self.where}

    def __str__(self) -> str:
        return self.method if self.checkpoint is None else f"{self.method} {self.checkpoint}@{self.where}"


def candidates(geometry: ModelGeometry, *, exact: bool = False) -> Iterator[Candidate]:
    """Yield what could be asked for; ``exact``: exact methods only. A residual's strides are 1 and a quarter of the
    layers, where the model keeps entries in more than one."""
    stride = len(geometry.layers) // 4
    kinds = ["kv", "residual", *([f"residual:{stride}"] if stride > 1 else []), "tokens"]
    for family in FAMILIES:
        try:
            exactness = resolve(family.method).exactness
        except UsageError:
            continue
        if exact and exactness is not Exactness.EXACT:
            continue
        if family.fate not in ("checkpoint", "verified"):
            yield Candidate(family, str(exactness))
            continue
        for kind in kinds:
            for where in PLACES[:1] if kind == "tokens" else PLACES:
                yield Candidate(family, str(exactness), kind, where)
