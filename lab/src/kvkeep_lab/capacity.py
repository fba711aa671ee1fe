"""The capacity of a machine: sessions that fit in its memory, tokens per second, and the cost of fetching a session
from another place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.budget import MIN_CHUNK, Budget
from kvkeep.errors import BudgetError, UsageError
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.costs import Cost, Work, cost
from kvkeep.plan.machine import Machine
from kvkeep.plan.planner import ACCEPTANCE, ANSWER
from kvkeep.plan.shape import Shape
from kvkeep.plan.sizes import Sizes, grant, sizes

GBIT = 1e9 / 8
"""Bytes per second of 1 Gbit/s."""


@dataclass(frozen=True)
class Capacity:
    """Sessions of one length in one kind of cache, on one machine. Bytes on the host count if host and device share
    memory."""

    candidate: Candidate
    sizes: Sizes
    """Sizes of one session after its answer."""
    idle: int
    """Bytes of device memory of a session between passes."""
    granted: int
    """Peak bytes that a server reserves for a session during an answer."""
    sessions: int
    """Number of sessions that run at the same time."""
    single: Cost
    """Cost of a single session."""
    shared: Cost | None
    """Cost of a session while all of them run; None if no session fits."""

    @property
    def rate(self) -> float:
        """Tokens per second of all sessions."""
        return self.sessions / self.shared.step if self.shared is not None else 0.0

    @property
    def fixed_share(self) -> float | None:
        """Share of a step of all sessions that is independent of the length of their texts: weights, logits and fixed
        times."""
        return self.shared.fixed / self.shared.step if self.shared is not None else None

    @property
    def pays_from(self) -> float:
        """Bytes per second above which fetching the session is faster than reading its text again."""
        return self.sizes.total / self.single.prefill

    def fetched(self, rate: float) -> float:
        """Return the seconds to fetch the session at ``rate`` bytes per second."""
        return self.sizes.total / rate

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain types: bytes, seconds, tokens per second."""
        return {
            "cache": str(self.candidate),
            "class": str(self.candidate.method.exactness),
            "context": self.sizes.tokens,
            "budget": self.sizes.budget,
            "held_bytes": self.idle,
            "granted_bytes": self.granted,
            "stored_bytes": self.sizes.total,
            "moved_bytes": self.single.moved,
            "sessions": self.sessions,
            "prefill_s": self.single.prefill,
            "alone_tokens_s": 1 / self.single.step,
            "together_tokens_s": self.rate,
            "own_share": self.fixed_share,
            "pays_from_bytes_s": self.pays_from,
        }


@dataclass(frozen=True)
class Rebuilding:
    """The cost of projecting residuals, compared with fetching the entries."""

    tokens: int
    seconds: float
    """Seconds to project all residuals, which are on the device."""
    entries: int
    """Bytes of the keys and values."""
    residuals: int
    """Bytes of the residuals."""

    @property
    def pays_below(self) -> float:
        """Bytes a second below which fetching entries takes longer than projecting residuals on the device."""
        return self.entries / self.seconds


def capacities(
    shape: Shape,
    machine: Machine,
    memory: int,
    context: int,
    budget: str,
    caches: Sequence[Candidate],
    *,
    answer: int = ANSWER,
    acceptance: float = ACCEPTANCE,
    tell: Callable[[str], object] = lambda text: None,
) -> Iterator[Capacity]:
    """Yield the capacity of ``machine`` for each cache, with ``memory`` bytes for sessions of ``context`` tokens,
    including the answer.

    budget: budget of each session. tell: called with the reason for each cache that is left out, because the budget is
    too small for it or holds the complete context. Raises UsageError for a context without a prompt, or beyond the
    positions of the model.
    """
    positions = shape.geometry.max_positions
    if context <= answer:
        raise UsageError(
            f"A session of {context:,} tokens is too short for a prompt and an answer of {answer:,}; give a "
            "longer context."
        )
    if positions is not None and context > positions:
        raise UsageError(
            f"A session of {context:,} tokens exceeds the model's {positions:,} positions; give a shorter context."
        )
    entries = Budget.parse(budget).entries(shape.geometry, context=context)
    for candidate in caches:
        skipped = f"'{candidate}' is left out at {context:,} tokens"
        if not candidate.keeps_all and entries >= context:
            tell(f"{skipped}: a budget of {entries:,} entries holds every token.")
            continue
        try:
            yield _capacity(shape, machine, memory, context, candidate, entries, answer, acceptance)
        except BudgetError as error:
            tell(f"{skipped}: {error}")


def _capacity(
    shape: Shape,
    machine: Machine,
    memory: int,
    context: int,
    candidate: Candidate,
    entries: int,
    answer: int,
    acceptance: float,
) -> Capacity:
    geometry, shared = shape.geometry, machine.shared
    budget = None if candidate.keeps_all else entries
    after = sizes(geometry, candidate, context - answer, budget, shared=shared, steps=answer)
    read = sizes(geometry, candidate, context, budget, shared=shared)
    granted = grant(geometry, candidate, read.budget, context, shared=shared)
    count = memory // granted
    if after.host and not shared:
        count = min(count, machine.host_bytes // after.host)
    single = cost(shape, candidate, read, machine, acceptance)
    every = cost(shape, candidate, read, machine, acceptance, count) if count else None
    return Capacity(candidate, after, after.idle(shared), granted, count, single, every)


def rebuilding(shape: Shape, machine: Machine, candidate: Candidate, tokens: int) -> Rebuilding:
    """Return the cost of projecting the residuals of ``candidate`` if all ``tokens`` tokens are rebuilt."""
    size = sizes(shape.geometry, candidate, tokens, MIN_CHUNK, shared=machine.shared)
    entries, residuals = (tokens * shape.geometry.checkpoint_bytes_per_token(kind) for kind in ("kv", "residual"))
    return Rebuilding(tokens, Work(shape, candidate, size, machine).rebuilt(tokens), entries, residuals)


def balance(shape: Shape, machine: Machine, candidate: Candidate, sessions: int) -> float:
    """Return the tokens per session above which attention takes more than half of a step of ``sessions`` sessions.
    candidate: a cache that keeps all entries."""
    tokens = 1024
    size = sizes(shape.geometry, candidate, tokens, None, shared=machine.shared)
    one = cost(shape, candidate, size, machine, ACCEPTANCE, sessions)
    return tokens * one.fixed / (one.step - one.fixed)
