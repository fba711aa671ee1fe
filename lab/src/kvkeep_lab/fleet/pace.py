"""What one replica does in a second, measured or by the planner."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvkeep.errors import UsageError
from kvkeep.plan.capacity import parse
from kvkeep.plan.costs import cost
from kvkeep.plan.machine import Machine
from kvkeep.plan.planner import ACCEPTANCE
from kvkeep.plan.shape import Shape
from kvkeep.plan.sizes import sizes


@dataclass(frozen=True)
class Pace:
    """Seconds and bytes of one replica.

    name: a few words. steps: points (sessions, seconds) of a step that reads nothing of their pasts; lines between them
    and beyond. entry_s: seconds that a step takes for each token of a past that it reads. read_s: seconds to read a
    token of a prompt, alone; read_entry_s: the same for each token before it; least_s: of a whole prompt, at least.
    chunk: tokens of a prompt that are read in a step of others. memory: bytes for caches. longest: tokens of a session.
    entries: tokens of a past that are read and held, None for all. hot, cold: bytes of the replica's memory for each of
    those, and for every token. away: bytes at rest for every token beside these.
    """

    name: str
    steps: tuple[tuple[float, float], ...]
    read_s: float
    memory: float
    hot: float
    entry_s: float = 0.0
    read_entry_s: float = 0.0
    least_s: float = 0.0
    chunk: int = 128
    longest: int = 131072
    entries: int | None = None
    cold: float = 0.0
    away: float = 0.0

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Pace:
        """Read a JSON object of the fields. Raises UsageError for anything else."""
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**given | {"steps": tuple((float(count), float(took)) for count, took in given["steps"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"The pace '{path}' cannot be read as the figures of a replica: {error}.") from None

    @classmethod
    def planned(
        cls, shape: Shape, machine: Machine, memory: int, name: str, budget: int, tokens: int, chunk: int = 512
    ) -> Pace:
        """Return what the planner predicts of a machine, as straight lines about sessions of ``tokens``.

        name, budget: of the cache, as ``kvkeep capacity`` takes them. Raises UsageError for methods that draft, whose
        rounds are no steps.
        """
        candidate = parse(name)
        if candidate.method.recall.drafts:
            raise UsageError(f"'{name}' drafts, and rounds are not simulated; take another method.")
        own = None if candidate.keeps_all else min(budget, tokens)
        few, many = (
            sizes(shape.geometry, candidate, count, own, shared=machine.shared) for count in (tokens // 4, tokens)
        )
        counts = [2**power for power in range(11)]
        costs = [cost(shape, candidate, many, machine, ACCEPTANCE, count) for count in counts]
        before = cost(shape, candidate, few, machine, ACCEPTANCE).prefill
        # The prompt is a t + b t²/2 seconds: b for each token before.
        growth = (costs[0].prefill / tokens - before / (tokens // 4)) / (tokens - tokens // 4)
        whole = own is None or candidate.method.checkpoints
        read = many.tokens if whole else min(tokens, own or tokens)
        resident = min(tokens, own or tokens)
        return cls(
            name=f"{candidate}, {machine.name}",
            steps=tuple((float(count), one.own) for count, one in zip(counts, costs, strict=True)),
            read_s=max(0.0, costs[0].prefill / tokens - growth * tokens),
            read_entry_s=max(0.0, 2 * growth),
            memory=float(memory - many.hand - many.workspace),
            hot=(many.resident + many.compressed) / resident,
            entry_s=(costs[0].step - costs[0].own) / read,
            least_s=costs[0].own,
            chunk=chunk,
            longest=shape.geometry.max_positions or 10**9,
            entries=own,
            cold=many.device / tokens,
            away=(many.host + many.disk) / tokens,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain types."""
        return asdict(self)

    def own(self, sessions: int) -> float:
        """Return the seconds of a step of so many sessions without their pasts."""
        points = self.steps
        at = min(max(1, bisect(points, (sessions, math.inf))), len(points) - 1)
        if len(points) == 1:
            return points[0][1]
        (low, first), (high, last) = points[at - 1], points[at]
        return first + (last - first) * (sessions - low) / (high - low)

    def past(self, tokens: float) -> float:
        """Return how many tokens of a past a step reads."""
        return tokens if self.entries is None or self.cold or self.away else min(tokens, self.entries)

    def reading(self, past: float, new: float) -> float:
        """Return the seconds to read ``new`` tokens after ``past``, alone."""
        return max(self.least_s, new * (self.read_s + self.read_entry_s * (past + new / 2)))

    def held(self, tokens: float) -> float:
        """Return the bytes of memory that a session takes."""
        hot = tokens if self.entries is None else min(tokens, self.entries)
        return self.hot * hot + self.cold * tokens

    def stored(self, tokens: float) -> float:
        """Return the bytes of a session at rest."""
        return self.held(tokens) + self.away * tokens
