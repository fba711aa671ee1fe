"""What one machine carries: how many sessions fit in its memory, what they write together, and what it takes to bring
one of them there from another place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.budget import MIN_CHUNK, Budget
from kvkeep.errors import BudgetError, UsageError
from kvkeep.plan import costs
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.costs import Cost, cost
from kvkeep.plan.grant import grant
from kvkeep.plan.machine import Machine
from kvkeep.plan.planner import ACCEPTANCE, ANSWER
from kvkeep.plan.shape import Shape
from kvkeep.plan.sizes import Sizes, sizes
from kvkeep.policies.methods import resolve
from kvkeep.stores.checkpoints.spec import CheckpointSpec

METHODS = (
    *("full", "quantized:4", "h2o", "kv-direct kv@host", "kv-direct residual@device"),
    *("snapkv+pages kv@host", "snapkv+verified kv@host"),
)
"""Caches to begin with: everything in memory, in four bits, a part of it, and all of it with a part in memory."""

GBIT = 1e9 / 8
"""Bytes a second."""


@dataclass(frozen=True)
class Capacity:
    """Sessions of one length in one kind of cache, on one machine.

    held: bytes of the device's memory that a session has while nothing is read or written. granted: those that it can
    come to hold while it is answered, as a server counts them (:func:`~kvkeep.plan.grant.grant`). Both have what is on
    the host where its memory is the device's. sessions: how many are answered at once. alone: the costs of one.
    together: those of all; None where none fits.
    """

    candidate: Candidate
    sizes: Sizes
    held: int
    granted: int
    sessions: int
    alone: Cost
    together: Cost | None

    @property
    def stored(self) -> int:
        """Bytes of a session at rest, which have to be brought where it goes on."""
        return self.sizes.resident + self.sizes.compressed + self.sizes.checkpoints

    @property
    def rate(self) -> float:
        """Tokens a second of all sessions together."""
        return self.sessions / self.together.step if self.together is not None else 0.0

    @property
    def own_share(self) -> float | None:
        """The share of a step of all sessions that reads nothing of their pasts: weights, logits and all else."""
        return self.together.own / self.together.step if self.together is not None else None

    @property
    def pays_from(self) -> float:
        """Bytes a second from which on fetching the session is faster than reading its text again."""
        return self.stored / self.alone.prefill

    def fetched(self, rate: float) -> float:
        """Seconds to fetch the session at so many bytes a second."""
        return self.stored / rate

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain types: bytes, seconds, tokens a second."""
        return {
            "cache": str(self.candidate),
            "class": str(self.candidate.exactness),
            "context": self.sizes.tokens,
            "budget": self.sizes.budget,
            "held_bytes": self.held,
            "granted_bytes": self.granted,
            "stored_bytes": self.stored,
            "moved_bytes": self.alone.moved,
            "sessions": self.sessions,
            "prefill_s": self.alone.prefill,
            "alone_tokens_s": 1 / self.alone.step,
            "together_tokens_s": self.rate,
            "own_share": self.own_share,
            "pays_from_bytes_s": self.pays_from,
        }


@dataclass(frozen=True)
class Rebuilding:
    """What projecting the residuals of ``tokens`` tokens takes, beside their entries from elsewhere. seconds: of all
    projections, the residuals being on the device. entries, residuals: bytes of either."""

    tokens: int
    seconds: float
    entries: int
    residuals: int

    @property
    def pays_below(self) -> float:
        """Bytes a second below which entries take longer to come than residuals on the device to be projected."""
        return self.entries / self.seconds


def capacities(
    shape: Shape,
    machine: Machine,
    memory: int,
    context: int,
    budget: str,
    methods: Sequence[str] = METHODS,
    *,
    answer: int = ANSWER,
    acceptance: float = ACCEPTANCE,
    tell: Callable[[str], object] = lambda text: None,
) -> Iterator[Capacity]:
    """Yield what ``machine`` carries in ``memory`` bytes of sessions of ``context`` tokens, answer included, cache by
    cache.

    budget: of each session, as everywhere. methods: as :func:`parse` takes them. A cache that cannot work in this
    budget, or needs none of it because it is no smaller than the context, is left out, and ``tell`` gets the reason.
    """
    positions = shape.geometry.max_positions
    if context <= answer:
        raise UsageError(f"A session of {context:,} tokens has no room for a prompt and {answer:,} of an answer.")
    if positions is not None and context > positions:
        raise UsageError(f"The model has {positions:,} positions, and {context:,} tokens are more.")
    entries = Budget.parse(budget).entries(shape.geometry, context=context)
    for candidate in map(parse, methods):
        if not candidate.keeps_all and entries >= context:
            tell(f"'{candidate}' is left out at {context:,} tokens: {entries:,} entries hold them as they are.")
            continue
        try:
            own = None if candidate.keeps_all else entries
            yield _capacity(shape, machine, memory, context, candidate, own, answer, acceptance)
        except BudgetError as error:
            tell(f"'{candidate}' is left out at {context:,} tokens: {error}")


def parse(name: str) -> Candidate:
    """Return the cache of a name like ``h2o`` or ``kv-direct residual@disk``: a method and, where it has checkpoints,
    their kind and place (``kv@host`` where there is none). Raises UsageError for others."""
    spec, _, checkpoint = name.partition(" ")
    kind, _, where = checkpoint.partition("@")
    method = resolve(spec)
    if not method.checkpoints:
        if checkpoint:
            raise UsageError(f"'{spec}' has no checkpoints, so it has none of '{checkpoint}'.")
        return Candidate(spec)
    parsed = CheckpointSpec.parse(kind or "kv", where or "host")
    return Candidate(spec, str(parsed), parsed.where)


def _capacity(
    shape: Shape,
    machine: Machine,
    memory: int,
    context: int,
    candidate: Candidate,
    budget: int | None,
    answer: int,
    acceptance: float,
) -> Capacity:
    prompt = context - answer
    held = sizes(shape.geometry, candidate, prompt, budget, answer, shared=machine.shared, steps=answer)
    read = sizes(shape.geometry, candidate, context, budget, shared=machine.shared)
    entries = context if candidate.method.selector.layout == "static" else budget
    granted = grant(shape.geometry, candidate, entries, context, shared=machine.shared)
    count = memory // granted
    if held.host and not machine.shared:
        count = min(count, machine.host_bytes // held.host)
    alone = cost(shape, candidate, read, machine, acceptance)
    together = cost(shape, candidate, read, machine, acceptance, count) if count else None
    return Capacity(candidate, held, held.held(machine.shared), granted, count, alone, together)


def rebuilding(shape: Shape, machine: Machine, tokens: int) -> Rebuilding:
    """Return what projecting residuals takes instead of fetching entries."""
    candidate = Candidate("kv-direct", "residual", "device")
    held = sizes(shape.geometry, candidate, tokens, MIN_CHUNK, shared=machine.shared)
    kinds = [tokens * shape.geometry.checkpoint_bytes_per_token(kind) for kind in ("kv", "residual")]
    return Rebuilding(tokens, costs.rebuilding(shape, candidate, held, machine), kinds[0], kinds[1])


def balance(shape: Shape, machine: Machine, sessions: int) -> float:
    """Return the tokens of each of ``sessions`` from which on a step of ``full`` reads their entries for longer than it
    takes for weights and all else."""
    candidate, tokens = Candidate("full"), 1024
    held = sizes(shape.geometry, candidate, tokens, None, shared=machine.shared)
    one = cost(shape, candidate, held, machine, ACCEPTANCE, sessions)
    return tokens * one.own / (one.step - one.own)
