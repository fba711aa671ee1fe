"""The plan: every cache that fits, its cost, the Pareto frontier, and the recommended cache."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.budget import MIN_CHUNK, Budget, bytes_of
from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.weight_memory import free_memory
from kvkeep.plan.candidates import Candidate, candidates
from kvkeep.plan.costs import Cost, cost
from kvkeep.plan.machine import Machine
from kvkeep.plan.rates import machine_here
from kvkeep.plan.shape import Shape, shape_of
from kvkeep.plan.sizes import Sizes, sizes
from kvkeep.plugins import first_line
from kvkeep.units import size, three_digits

log = logging.getLogger(__name__)

ACCEPTANCE = 0.95
"""Share of drafted tokens that an exact pass accepts, unless it was measured."""
ANSWER = 256
"""Tokens of the answer that a recommendation assumes."""
SHARES = (0.5, 0.25, 0.125, 0.0625)
"""Budgets to plan for in addition to the largest that fits, as shares of the context."""
_PROMISES = tuple(Exactness)


@dataclass(frozen=True)
class Row:
    """One cache with one budget, and its predicted cost."""

    candidate: Candidate
    sizes: Sizes
    """Bytes at the end of the answer."""
    cost: Cost
    """Seconds at the end of the prompt."""
    memory: int
    """Bytes of the device's memory at the peak."""
    fits: bool
    """Whether the peak fits in the given memory, and the checkpoints in the host's."""
    frontier: bool = False
    """Whether the row is on the Pareto frontier (:func:`frontier`)."""

    @property
    def exactness(self) -> Exactness:
        """Exactness that the method promises."""
        return self.candidate.method.exactness

    @property
    def budget(self) -> int | None:
        """Entries of each full layer."""
        return self.sizes.budget

    def seconds(self, answer: int) -> float:
        """Return the seconds of the prompt and ``answer`` decoded tokens."""
        return self.cost.prefill + answer * self.cost.step

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain types."""
        return {
            "method": self.candidate.spec,
            "checkpoint": self.candidate.checkpoint,
            "where": self.candidate.where,
            "class": str(self.exactness),
            "budget": self.budget,
            "kept": self.sizes.kept,
            "memory_bytes": self.memory,
            **{f"{name}_bytes": getattr(self.sizes, name) for name in ("resident", "compressed", "workspace")},
            "checkpoint_bytes": {place: getattr(self.sizes, place) for place in ("device", "host", "disk")},
            "step_s": self.cost.step,
            "prefill_s": self.cost.prefill,
            "drafts": self.cost.drafts,
            "frontier": self.frontier,
        }


@dataclass(frozen=True)
class Planned:
    """The result of :func:`plan`."""

    shape: Shape
    machine: Machine
    context: int
    """Tokens of the prompt."""
    memory: int
    """Bytes of the device's memory for the cache."""
    answer: int
    """Tokens of the answer."""
    rows: tuple[Row, ...]
    """The caches that fit, by memory."""
    best: Row
    """The recommended row."""
    reason: str
    """The reason for the recommendation, in a sentence."""


def plan(
    shape: Shape,
    machine: Machine,
    context: int,
    memory: int,
    *,
    exact: bool = False,
    acceptance: float = ACCEPTANCE,
    answer: int = ANSWER,
) -> Planned:
    """Plan for a prompt of ``context`` tokens and an answer of ``answer`` tokens, with ``memory`` bytes of the device.

    exact: exact methods only. acceptance: share of drafted tokens that are accepted (0 to 1).
    Raises UsageError for a context beyond the model's positions, BudgetError if no cache fits (its message gives the
    smallest sufficient memory), and UnsupportedModelError for layers that a budget cannot limit.
    """
    geometry, shared = shape.geometry, machine.shared
    _check(geometry, context, acceptance)

    def row(candidate: Candidate, budget: int | None) -> Row:
        read = sizes(geometry, candidate, context, budget, shared=shared)
        end = sizes(geometry, candidate, context, budget, shared=shared, steps=answer)
        peak = max(read.memory(shared), end.memory(shared))
        fits = peak <= memory and (shared or end.host <= machine.host_bytes)
        return Row(candidate, end, cost(shape, candidate, read, machine, acceptance), peak, fits)

    rows, faults = list[Row](), dict[str, str]()
    for candidate in candidates(geometry, exact=exact):
        try:
            budgets = _budgets(geometry, machine, candidate, context, answer, memory)
            rows += [row(candidate, budget) for budget in budgets]
        except Exception as error:  # a failing plugin must not end the plan
            if not candidate.from_plugin:
                raise
            faults[candidate.spec] = first_line(error)
    for fault in faults.items():
        log.warning("'%s' is left out of the plan: %s", *fault)
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(rows, key=lambda row: row.memory)
        raise BudgetError(
            f"No cache of {context:,} tokens fits into {size(memory)}: the least is "
            f"{size(least.memory, up=True)}, for {_named(least)}."
        )
    marked = [replace(row, frontier=best) for row, best in zip(fitting, frontier(fitting), strict=True)]
    # Prefer the strictest promise, then the shortest time, rounded to 0.01 s.
    best = min(marked, key=lambda row: (_PROMISES.index(row.exactness), round(row.seconds(answer), 2)))
    marked.sort(key=lambda row: (row.memory, row.cost.step))
    reason = _reason(best, marked, rows, answer)
    return Planned(shape, machine, context, memory, answer, tuple(marked), best, reason)


def frontier(rows: Sequence[Row]) -> list[bool]:
    """Return for each row whether it is on the Pareto frontier: no other row beats it in memory and time per token
    with the same or a stricter promise and at least the same number of readable tokens. The quality of a method's
    choice of tokens is not predicted."""
    points = [(row.memory, row.cost.step, _PROMISES.index(row.exactness), -row.sizes.kept) for row in rows]
    return [
        not any(
            all(a <= b for a, b in zip(other, point, strict=True)) and (other != point or at < number)
            for at, other in enumerate(points)
        )
        for number, point in enumerate(points)
    ]


def _check(geometry: ModelGeometry, context: int, acceptance: float) -> None:
    if context < 1:
        raise UsageError(f"A context has at least 1 token, not {context}.")
    if geometry.max_positions is not None and context > geometry.max_positions:
        raise UsageError(
            f"The model's context has {geometry.max_positions:,} positions, fewer than {context:,} tokens; give a "
            "shorter context."
        )
    if not 0 <= acceptance <= 1:
        raise UsageError(f"An acceptance is a share from 0 to 1, not {acceptance:g}.")
    Budget.parse(MIN_CHUNK).entries(geometry)  # refuses layers without keys and values


def _budgets(
    geometry: ModelGeometry, machine: Machine, candidate: Candidate, context: int, answer: int, memory: int
) -> Iterator[int | None]:
    """Yield the budgets to plan for: shares of the context, the smallest, and the largest that fits if it differs."""
    if candidate.keeps_all:
        yield None
        return

    def needed(entries: int) -> int:
        """Return the bytes for a budget of ``entries``; 0 if it is too small for the method."""
        try:
            end = sizes(geometry, candidate, context, entries, shared=machine.shared, steps=answer)
        except BudgetError:
            return 0
        return end.memory(machine.shared)

    counts = range(context + 1)
    least = bisect_left(counts, 1, MIN_CHUNK, key=needed)
    largest = bisect_right(counts, memory, least, key=needed) - 1
    small = 16 * MIN_CHUNK
    for entries in sorted({least, 4 * MIN_CHUNK, small, largest, *(int(share * context) for share in SHARES)}):
        if least <= entries < context and (entries <= max(least, small) or needed(entries) <= memory):
            yield entries


def _named(row: Row) -> str:
    return f"'{row.candidate}'" + ("" if row.budget is None else f" with {row.budget:,} entries a layer")


def _reason(best: Row, fitting: Sequence[Row], rows: Sequence[Row], answer: int) -> str:
    """Return the reason for ``best``, and possible alternatives."""
    text = (
        f"Take {_named(best)}: it is {best.exactness}, and no other {best.exactness} cache that fits is faster "
        f"({three_digits(best.cost.prefill)} s for the prompt, {three_digits(1e3 * best.cost.step)} ms a token)"
    )
    everything = next((row for row in rows if row.candidate.keeps_all), None)
    if everything is not None and not everything.fits:
        text += (
            f"; the memory is too small for '{everything.candidate}', which needs {size(everything.memory, up=True)}"
        )
    others = [row for row in fitting if row.exactness != best.exactness and row.frontier]
    faster = min(others, key=lambda row: row.seconds(answer), default=None)
    if faster is not None and faster.seconds(answer) < 0.9 * best.seconds(answer):
        step = three_digits(1e3 * faster.cost.step)
        text += f"; '{faster.candidate}' takes {step} ms a token, but is {faster.exactness}"
    return text + "."


# -- for a budget of "auto" -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The recommended cache: ``KeepCache(model, **choice.options())``."""

    method: str
    budget: int | None
    """Entries of each full layer."""
    checkpoint: str | None
    where: str | None
    reason: str
    """The reason in a sentence, with a note if times are estimated."""
    rates: str
    """Source of the machine's rates: "measured", or "estimated" with the command that measures them."""

    def options(self) -> dict[str, Any]:
        """Return the arguments method, budget, checkpoint and where."""
        return {"method": self.method, "budget": self.budget, "checkpoint": self.checkpoint, "where": self.where}


def recommend(
    model: Any,
    context: int,
    memory: int | str | None = None,
    *,
    exact: bool = True,
    answer: int = ANSWER,
) -> Choice:
    """Return the recommended cache for a loaded ``model`` and a prompt of ``context`` tokens.

    memory: bytes for the cache ("64MB"); by default half of the free memory of the model's device. The rates come from
    an earlier ``kvkeep calibrate``, or are estimates; this function measures nothing. Raises the errors of
    :func:`plan`.
    """
    parameter = next(model.parameters())
    machine = machine_here(str(parameter.device), parameter.dtype)
    amount = bytes_of(memory) if memory is not None else free_memory(parameter.device) // 2
    shape = shape_of(model.config, parameter.dtype.itemsize)
    planned = plan(shape, machine, context, amount, exact=exact, answer=answer)
    best = planned.best.candidate
    reason = f"{planned.reason} Times are {machine.source}." if machine.estimated else planned.reason
    return Choice(best.spec, planned.best.budget, best.checkpoint, best.where, reason, machine.source)
