"""The candidates of the planner: every listed method, with each kind and place of its checkpoints."""

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
    """A method and its checkpoints; the budget is chosen later."""

    method: Method
    checkpoint: str | None = None
    """Kind of its checkpoints, such as "residual:4"; None without checkpoints."""
    where: str | None = None
    """Place of its checkpoints; None without checkpoints."""
    capacity: int | None = None
    """Maximum number of entries in a checkpoint; None: no limit."""

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Parse ``h2o`` or ``kv-direct residual@disk``: a method and, if it has checkpoints, their kind and place (by
        default ``kv@host``). Raises UsageError for any other text."""
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
        """The method as written in commands."""
        return self.method.name

    @property
    def keeps_all(self) -> bool:
        """Whether the cache keeps all entries."""
        return self.method.selector.keeps_all

    @property
    def from_plugin(self) -> bool:
        """Whether a plugin (another package, or a script) defines a part of the method."""
        parts = (self.method.selector, self.method.fate, self.method.recall)
        return not all(type(part).__module__.startswith("kvkeep.") for part in parts)

    @property
    def stride(self) -> int:
        """Layers per stored residual; 0 if checkpoints store entries."""
        kind, _, stride = (self.checkpoint or "kv").partition(":")
        return {"kv": 0, "tokens": 10**6}.get(kind, int(stride or 1))

    def options(self, budget: str | int | None) -> dict[str, Any]:
        """Return the options of a :class:`~kvkeep.cache.KeepCache` with this budget."""
        return {"budget": budget, "checkpoint": self.checkpoint, "where": self.where}

    def __str__(self) -> str:
        return self.spec if self.checkpoint is None else f"{self.spec} {self.checkpoint}@{self.where}"


def specs() -> list[str]:
    """Return the methods to plan for. The planner recommends the first of equal ones.

    Methods that read a text twice are left out, and methods whose bytes the geometry does not determine. So is
    ``endless``: a plan is for texts within the model's positions, where it is ``kv-direct``.
    """
    known = {name: resolve(name) for name in names()}
    planned = {name: method for name, method in known.items() if method.reading is None and not method.recall.endless}
    return [
        f"{name}:{parameters}" if parameters else name
        for name, method in planned.items()
        if method.fate.predictable
        for parameters in (PRESETS[name].planned if name in PRESETS else ("",))
    ]


def candidates(geometry: ModelGeometry, *, exact: bool = False) -> Iterator[Candidate]:
    """Yield the candidates for a model. ``exact``: exact methods only.

    Residuals are stored for every layer and, in models of eight layers or more, also for every quarter of the layers.
    """
    stride = len(geometry.layers) // 4
    kinds = ["kv", "residual", *([f"residual:{stride}"] if stride > 1 else []), "tokens"]
    for method in map(resolve, specs()):
        if exact and method.exactness is not Exactness.EXACT:
            continue
        if not method.checkpoints:
            yield Candidate(method)
            continue
        for kind in kinds:
            for where in PLACES[:1] if kind == "tokens" else PLACES:
                yield Candidate(method, kind, where)
