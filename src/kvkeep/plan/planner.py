"""The plan: every cache that fits, what it costs, which are worth having, and which one to take."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvkeep.budget import MIN_CHUNK, Budget, bytes_of
from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.weight_memory import free_memory
from kvkeep.plan.candidates import SHARES, Candidate, candidates, specs
from kvkeep.plan.costs import Cost, cost
from kvkeep.plan.machine import Machine
from kvkeep.plan.rates import machine_here
from kvkeep.plan.shape import Shape, shape_of
from kvkeep.plan.sizes import Sizes, sizes
from kvkeep.plugins import first_line

log = logging.getLogger(__name__)

ACCEPTANCE = 0.95
"""The share of drafted tokens that an exact pass confirms, where none was measured."""

ANSWER = 256
"""Tokens of the answer that a recommendation is for."""

_PROMISES = (Exactness.EXACT, Exactness.REVERSIBLE, Exactness.LOSSY)


@dataclass(frozen=True)
class Row:
    """One cache and what it would cost. memory: bytes of the device at the worst moment. frontier: no other row that
    promises as much and reads as much takes less memory and time. fits: within the memory given."""

    candidate: Candidate
    sizes: Sizes
    cost: Cost
    memory: int
    fits: bool
    frontier: bool = False

    @property
    def exactness(self) -> str:
        """What the method promises."""
        return str(self.candidate.exactness)

    @property
    def method(self) -> str:
        """The method as commands take it."""
        return self.candidate.spec

    @property
    def budget(self) -> int | None:
        """Entries of each full layer."""
        return self.sizes.budget

    def seconds(self, answer: int) -> float:
        """Return the time of the prompt and ``answer`` tokens."""
        return self.cost.prefill + answer * self.cost.step

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain types."""
        held = asdict(self.sizes)
        return {
            "method": self.candidate.spec,
            "checkpoint": self.candidate.checkpoint,
            "where": self.candidate.where,
            "class": self.exactness,
            "budget": self.budget,
            "kept": self.sizes.kept,
            "memory_bytes": self.memory,
            **{f"{name}_bytes": held[name] for name in ("resident", "compressed", "workspace")},
            "checkpoint_bytes": {place: held[place] for place in ("device", "host", "disk")},
            "step_s": self.cost.step,
            "prefill_s": self.cost.prefill,
            "drafts": self.cost.drafts,
            "frontier": self.frontier,
        }


@dataclass(frozen=True)
class Planned:
    """Rows by memory, the one to take, and why, in a sentence."""

    shape: Shape
    machine: Machine
    context: int
    memory: int
    answer: int
    rows: tuple[Row, ...]
    best: Row
    reason: str


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
    """Plan for a prompt of ``context`` tokens and ``answer`` more, with ``memory`` bytes of the device for the cache.

    exact: exact methods only. acceptance: for methods that draft tokens, the share that stays (0 to 1).
    Raises UsageError for a context the model has no positions for, BudgetError where nothing fits (with the least that
    would), UnsupportedModelError for layers that no budget governs.
    """
    geometry = shape.geometry
    _check(geometry, context, acceptance)
    rows, faults = list[Row](), dict[str, str]()
    for candidate in candidates(geometry, exact=exact):
        try:
            rows += [
                _row(shape, machine, candidate, context, budget, answer, memory, acceptance)
                for budget in _budgets(geometry, machine, candidate, context, answer, memory)
            ]
        except Exception as error:
            if not candidate.foreign:
                raise
            faults[candidate.spec] = first_line(error)  # of a package, which takes nothing else with it
    for spec, reason in faults.items():
        log.warning("'%s' is left out of the plan: %s", spec, reason)
    fitting = _with_frontier([row for row in rows if row.fits])
    if not fitting:
        least = min(rows, key=lambda row: row.memory)
        raise BudgetError(
            f"No cache of {context:,} tokens fits in {memory:,}B: the least is {least.memory:,}B, for "
            f"'{least.candidate}'{'' if least.budget is None else f' with {least.budget} entries a layer'}."
        )
    order = {spec: number for number, spec in enumerate(specs())}
    # What promises most comes first, and of that what is fastest, to a hundredth: nobody would see less.
    best = min(
        fitting,
        key=lambda row: (_PROMISES.index(Exactness(row.exactness)), round(row.seconds(answer), 2), order[row.method]),
    )
    return Planned(shape, machine, context, memory, answer, tuple(fitting), best, _reason(best, fitting, rows, answer))


def frontier(rows: Sequence[Row]) -> list[bool]:
    """Return which rows no other one beats: in memory and in time for a token, at the same promise or a better one,
    with as many tokens of the text still to be read. How well a method chooses those is not foreseen."""
    points = [(row.memory, row.cost.step, _PROMISES.index(Exactness(row.exactness)), -row.sizes.kept) for row in rows]
    return [
        not any(
            all(a <= b for a, b in zip(other, point, strict=True)) and (other != point or at < number)
            for at, other in enumerate(points)
        )
        for number, point in enumerate(points)
    ]


def _with_frontier(rows: Sequence[Row]) -> list[Row]:
    marked = [replace(row, frontier=best) for row, best in zip(rows, frontier(rows), strict=True)]
    return sorted(marked, key=lambda row: (row.memory, row.cost.step))


def _check(geometry: ModelGeometry, context: int, acceptance: float) -> None:
    if context < 1:
        raise UsageError(f"A context has 1 token or more, not {context}.")
    if geometry.max_positions is not None and context > geometry.max_positions:
        raise UsageError(f"The model has {geometry.max_positions:,} positions, and {context:,} tokens are more.")
    if not 0 <= acceptance <= 1:
        raise UsageError(f"An acceptance is a share from 0 to 1, not {acceptance:g}.")
    Budget.parse(MIN_CHUNK).entries(geometry)  # refuses layers that are not keys and values


def _budgets(
    geometry: ModelGeometry, machine: Machine, candidate: Candidate, context: int, answer: int, memory: int
) -> Iterator[int | None]:
    """Yield budgets to plan for: shares of the context, the least, and the largest that fits where that is another."""
    if candidate.keeps_all:
        yield None
        return

    def needed(entries: int) -> int:
        """Return the bytes with so many entries, 0 where they are too few for the method."""
        try:
            held = sizes(geometry, candidate, context, entries, shared=machine.shared, steps=answer)
        except BudgetError:
            return 0
        return held.memory(machine.shared)

    counts = range(context + 1)
    least = bisect_left(counts, 1, MIN_CHUNK, key=needed)
    largest = bisect_right(counts, memory, least, key=needed) - 1
    small = 16 * MIN_CHUNK
    for entries in sorted({least, 4 * MIN_CHUNK, small, largest, *(int(share * context) for share in SHARES)}):
        if least <= entries < context and (entries <= max(least, small) or needed(entries) <= memory):
            yield entries


def _row(
    shape: Shape,
    machine: Machine,
    candidate: Candidate,
    context: int,
    budget: int | None,
    answer: int,
    memory: int,
    acceptance: float,
) -> Row:
    """Cost at the prompt's end, bytes at the answer's."""
    read = sizes(shape.geometry, candidate, context, budget, answer, shared=machine.shared)
    held = sizes(shape.geometry, candidate, context, budget, answer, shared=machine.shared, steps=answer)
    needed = max(read.memory(machine.shared), held.memory(machine.shared))
    host = 0 if machine.shared else held.host
    fits = needed <= memory and host <= machine.host_bytes
    return Row(candidate, held, cost(shape, candidate, read, machine, acceptance), needed, fits)


def _reason(best: Row, fitting: Sequence[Row], rows: Sequence[Row], answer: int) -> str:
    """Say why ``best`` is recommended, and what a person might want instead."""
    entries = "" if best.budget is None else f" with {best.budget:,} entries a layer"
    text = (
        f"Take '{best.candidate}'{entries}: it is {best.exactness}, and of what is and fits nothing takes less time "
        f"({best.cost.prefill:.3g} s for the prompt, {1e3 * best.cost.step:.3g} ms a token)"
    )
    full = next((row for row in rows if row.candidate.spec == "full"), None)
    if full is not None and not full.fits:
        text += f"; 'full' would need {full.memory:,}B"
    others = [row for row in fitting if row.exactness != best.exactness]
    faster = min(others, key=lambda row: row.seconds(answer), default=None)
    if faster is not None and faster.seconds(answer) < 0.9 * best.seconds(answer):
        text += f"; '{faster.candidate}' would take {1e3 * faster.cost.step:.3g} ms, but is {faster.exactness}"
    return text + "."


# -- for a budget of "auto" -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What a :class:`~kvkeep.cache.KeepCache` is asked for: ``KeepCache(model, **choice.options())``."""

    method: str
    budget: int | None
    checkpoint: str | None
    where: str | None
    reason: str
    """Why, in a sentence; and that times are estimated, where they are."""
    rates: str
    """Where the machine's rates come from: "measured", or "estimated" and how they are measured."""

    def options(self) -> dict[str, Any]:
        """Return method, budget, checkpoint and where."""
        return {"method": self.method, "budget": self.budget, "checkpoint": self.checkpoint, "where": self.where}


def recommend(
    model: Any,
    context: int,
    memory: int | str | None = None,
    *,
    exact: bool = True,
    answer: int = ANSWER,
) -> Choice:
    """Return the cache to take for a loaded ``model`` and a prompt of ``context`` tokens.

    memory: bytes for the cache ("64MB"); by default half of what is free where the model is. Nothing is measured: rates
    are those of an earlier ``kvkeep calibrate``, or estimates. Raises as :func:`plan`.
    """
    parameter = next(model.parameters())
    machine = machine_here(str(parameter.device), parameter.dtype)
    amount = bytes_of(memory) if memory is not None else free_memory(parameter.device) // 2
    shape = shape_of(model.config, parameter.dtype.itemsize)
    planned = plan(shape, machine, context, amount, exact=exact, answer=answer)
    best = planned.best.candidate
    reason = f"{planned.reason} Times are {machine.source}." if machine.estimated else planned.reason
    return Choice(best.spec, planned.best.budget, best.checkpoint, best.where, reason, machine.source)
