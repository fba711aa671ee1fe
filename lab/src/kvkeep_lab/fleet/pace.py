"""The speed and bytes of one replica, measured or predicted by the planner."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvkeep.errors import UsageError, reason_of
from kvkeep.memory.rows import BLOCK
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.costs import cost
from kvkeep.plan.machine import Machine
from kvkeep.plan.planner import ACCEPTANCE
from kvkeep.plan.shape import Shape
from kvkeep.plan.sizes import grant, sizes

_UNBOUNDED = 2**20  # maximum tokens of the points for a model without a limit


@dataclass(frozen=True)
class PiecewiseLine:
    """Points (x, y) with rising x and with y of at least 0. Values between points are interpolated linearly. Before the
    first point the value is its y; after the last one it continues the last line."""

    points: tuple[tuple[float, float], ...]

    def __call__(self, x: float) -> float:
        """Return y at ``x``."""
        points = self.points
        if x <= points[0][0] or len(points) == 1:
            return points[0][1]
        at = min(bisect(points, (x, math.inf)), len(points) - 1)
        (low, first), (high, last) = points[at - 1], points[at]
        return first + (last - first) * (x - low) / (high - low)

    @classmethod
    def of(cls, given: Any, name: str, least: float = 0.0) -> PiecewiseLine:
        """Check points from a file. Raises ValueError for invalid points."""
        try:
            points = tuple((float(x), float(y)) for x, y in given)
        except (TypeError, ValueError):
            raise ValueError(f"'{name}' is a list of points, each of two numbers") from None
        if not points or not all(math.isfinite(number) for point in points for number in point):
            raise ValueError(f"'{name}' is a list of one point or more, each of two numbers")
        if points[0][0] < 0 or any(low >= high for (low, _), (high, _) in pairwise(points)):
            raise ValueError(f"the first numbers of the points of '{name}' rise from 0 on")
        if min(y for _, y in points) < least or points[-1][1] < points[-2:][0][1]:
            raise ValueError(f"the second numbers of the points of '{name}' are too small or fall at the end")
        return cls(points)


@dataclass(frozen=True)
class ReplicaPace:
    """Seconds and bytes of one replica, as piecewise lines."""

    name: str
    """A short description."""
    step: PiecewiseLine
    """Seconds of a step without attention to the past, by number of sessions."""
    past: PiecewiseLine
    """Additional seconds of a step for a session, by its tokens."""
    prompt: PiecewiseLine
    """Seconds to read a prompt without other sessions, by its tokens."""
    held: PiecewiseLine
    """Bytes of an idle session in the replica's memory, by its tokens."""
    granted: PiecewiseLine
    """Bytes reserved for a session during an answer, by its tokens."""
    stored: PiecewiseLine
    """Bytes of a saved session, by its tokens."""
    memory: float
    """Bytes for caches."""
    chunk: int = 128
    """Tokens of a prompt read in a step with other sessions."""
    longest: int = 131072
    """Maximum tokens of a session."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ReplicaPace:
        """Read the fields from a JSON object. Raises UsageError for other contents."""
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls.of(given)
        except OSError as error:
            raise UsageError(f"The pace '{path}' cannot be read: {reason_of(error)}.") from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise UsageError(f"The pace '{path}' is not a JSON file.") from None
        except ValueError as error:
            raise UsageError(f"The pace '{path}' is not understood: {error}.") from None

    @classmethod
    def of(cls, given: Any) -> ReplicaPace:
        """Return the pace from plain types (:meth:`as_dict`). Raises ValueError for other values."""
        known = {field.name: field for field in fields(cls)}
        if not isinstance(given, dict) or not isinstance(given.get("name", ""), str):
            raise ValueError("it is no object of a name and the figures of a replica")
        if missing := [name for name in known if name not in given and name not in _DEFAULTS]:
            raise ValueError(f"it has no {', '.join(missing)}")
        if strange := [name for name in given if name not in known]:
            raise ValueError(f"it has {', '.join(strange)}, and known are {', '.join(known)}")
        lines = {name: PiecewiseLine.of(given[name], name, _LEAST.get(name, 0.0)) for name in _LINES}
        numbers = {name: given[name] for name in ("memory", *_DEFAULTS) if name in given}
        for name, number in numbers.items():
            integral = name in _DEFAULTS
            if type(number) not in ((int,) if integral else (int, float)) or not 0 < number < math.inf:
                raise ValueError(f"'{name}' is a {'whole ' if integral else ''}number above 0")
        longest = numbers.get("longest", cls.longest)
        corners = {tokens for name in ("held", "granted") for tokens, _ in lines[name].points if tokens < longest}
        for tokens in sorted(corners | {longest}):  # both lines are straight between these
            if lines["held"](tokens) > lines["granted"](tokens):
                raise ValueError(f"more is held than granted at {tokens:g} tokens")
        checked: dict[str, Any] = {"name": given["name"], **lines, **numbers}
        return cls(**checked)

    @classmethod
    def planned(
        cls, shape: Shape, machine: Machine, memory: int, name: str, budget: int, chunk: int = 512
    ) -> ReplicaPace:
        """Return the planner's prediction for a machine, for sessions up to the model's number of positions.

        name, budget: those of the cache, as in ``kvkeep capacity``. Raises UsageError for methods that draft, because
        they generate in rounds instead of steps.
        """
        candidate = Candidate.parse(name)
        if candidate.method.recall.drafts:
            raise UsageError(f"'{name}' drafts tokens, and the simulation has no rounds of drafts; use another method.")
        entries, longest = None if candidate.keeps_all else budget, shape.geometry.max_positions or _UNBOUNDED
        lengths = _lengths(longest, budget)
        every = [sizes(shape.geometry, candidate, count, entries, shared=machine.shared) for count in lengths]
        costs = [cost(shape, candidate, holding, machine, ACCEPTANCE) for holding in every]
        counts = [2**power for power in range(11)]
        steps = [cost(shape, candidate, every[0], machine, ACCEPTANCE, count).fixed for count in counts]
        granted = [grant(shape.geometry, candidate, entries, count, shared=machine.shared) for count in lengths]
        holding = [one.idle(machine.shared) for one in every]
        stored = [one.total for one in every]
        return cls(
            name=f"{candidate}, {machine.name}",
            step=_line(counts, steps),
            past=_line(lengths, [one.step - one.fixed for one in costs]),
            prompt=_line(lengths, [one.prefill for one in costs]),
            held=_line(lengths, holding),
            granted=_line(lengths, granted),
            stored=_line([0, *lengths[1:]], [0, *stored[1:]]),  # files contain rows instead of complete blocks
            memory=float(memory),
            chunk=chunk,
            longest=longest,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain types, with lines as their points (:meth:`of`)."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {name: values[name].points for name in _LINES}

    def reading(self, past: float, new: float) -> float:
        """Return the seconds to read ``new`` tokens after ``past`` without other sessions: at least the seconds of a
        step of one session."""
        before = self.prompt(past) if past else 0.0
        return max(self.step(1), self.prompt(past + new) - before)


_LINES = ("step", "past", "prompt", "held", "granted", "stored")
_DEFAULTS = ("chunk", "longest")
_LEAST = {"step": 1e-9}  # minimum seconds, so that a step takes time


def _lengths(longest: int, budget: int) -> list[int]:
    """Return the numbers of tokens to compute figures for: complete blocks, two per doubling, and the length that fills
    a budget."""
    found, count = {1, longest, *(edge for edge in (budget, budget + BLOCK) if 1 < edge < longest)}, float(BLOCK)
    while count < longest:
        found.add(round(count / BLOCK) * BLOCK)
        count *= math.sqrt(2)
    return sorted(found)


def _line(x: Sequence[float], y: Sequence[float]) -> PiecewiseLine:
    return PiecewiseLine(tuple((float(one), float(other)) for one, other in zip(x, y, strict=True)))
