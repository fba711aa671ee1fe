"""What the planner chooses between: every method that lists name, with each kind and place of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.places import PLACES
from kvkeep.policies.methods import Method, names, resolve
from kvkeep.policies.registry import PRESETS
from kvkeep.stores.checkpoints.spec import CheckpointSpec


@dataclass(frozen=True)
class Candidate:
    """One cache that could be built, without its budget."""

    method: Method
    checkpoint: str | None = None
    """The kind of its checkpoints, such as "residual:4"; None without checkpoints."""
    where: str | None = None
    """The place of its checkpoints; None without checkpoints."""

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Read ``h2o`` or ``kv-direct residual@disk``: a method and, where it has checkpoints, their kind and place (by
        default ``kv@host``). Raises UsageError for others."""
        spec, _, checkpoint = text.partition(" ")
        kind, _, where = checkpoint.partition("@")
        method = resolve(spec)
        if method.checkpoints:
            parsed = CheckpointSpec.parse(kind or method.kind or "kv", where or "host")
            return cls(method, str(parsed), parsed.where)
        if checkpoint:
            raise UsageError(f"'{spec}' has no checkpoints; leave '{checkpoint}' out.")
        return cls(method)

    @property
    def spec(self) -> str:
        """The method as commands take it."""
        return self.method.name

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is evicted."""
        return self.method.selector.keeps_all

    @property
    def from_plugin(self) -> bool:
        """Whether another package, or a script, defines a part of the method."""
        parts = (self.method.selector, self.method.fate, self.method.recall)
        return not all(type(part).__module__.startswith("kvkeep.") for part in parts)

    @property
    def stride(self) -> int:
        """Layers for each residual of a checkpoint; 0 for a checkpoint of entries."""
        kind, _, stride = (self.checkpoint or "kv").partition(":")
        return {"kv": 0, "tokens": 10**6}.get(kind, int(stride or 1))

    def options(self, budget: str | int | None) -> dict[str, Any]:
        """Return the options of a :class:`~kvkeep.cache.KeepCache` with this budget."""
        return {"budget": budget, "checkpoint": self.checkpoint, "where": self.where}

    def __str__(self) -> str:
        return self.spec if self.checkpoint is None else f"{self.spec} {self.checkpoint}@{self.where}"


def specs() -> list[str]:
    """Return the methods that are planned; among equals the first is recommended.

    Left out are methods that read a text twice, and those whose bytes do not follow from the geometry.
    """
    planned = {name: method for name in names() if (method := resolve(name)).reading is None}
    return [
        f"{name}:{parameters}" if parameters else name
        for name, method in planned.items()
        if method.fate.predictable
        for parameters in (PRESETS[name].planned if name in PRESETS else ("",))
    ]


def candidates(geometry: ModelGeometry, *, exact: bool = False) -> Iterator[Candidate]:
    """Yield what could be built; ``exact``: exact methods only. Residuals are kept for every layer and, in models of
    eight layers or more, for every quarter of the layers."""
    stride = len(geometry.layers) // 4
    kinds = ["kv", "residual", *([f"residual:{stride}"] if stride > 1 else []), "tokens"]
    for method in map(resolve, specs()):
        if exact and method.exactness is not Exactness.EXACT:
            continue
        if not method.checkpoints:
            yield Candidate(method)
            continue
        for kind in kinds[:2] if method.recall.reads_single else kinds:
            for where in PLACES[:1] if kind == "tokens" else PLACES:
                yield Candidate(method, kind, where)
