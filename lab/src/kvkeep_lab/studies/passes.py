"""``passes``: the time of a pass over several tokens, relative to that of one (:mod:`kvkeep.engine.batch`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from kvkeep.cache import KeepCache
from kvkeep.engine.batch import Read, forward
from kvkeep.engine.drafts import can_draft, expect_drafts, take_back
from kvkeep.errors import UsageError
from kvkeep.policies.methods import resolve
from kvkeep.stock import new_cache
from kvkeep_lab.partial import keeping
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import BUDGET, BudgetText, Count, Flag, OwnMethod, Study, Trial, rising
from kvkeep_lab.tables import Table, fixed, times
from kvkeep_lab.timing import random_ids

TEXT, SESSIONS = "one text", "sessions"
"""Whose tokens a pass reads: the next of one text, as its drafts are, or the next one of each of several sessions."""


@dataclass(frozen=True)
class PassTimes:
    """The passes of one kind."""

    method: str
    context: int
    """Tokens that each cache has read before."""
    whose: str
    """:data:`TEXT` or :data:`SESSIONS`."""
    tokens: int
    """Of a pass."""
    passes_ms: list[float] = field(default_factory=list)
    """Milliseconds of each pass, in the order of rounds."""

    @property
    def ms(self) -> float:
        """The median milliseconds of a pass."""
        return median(self.passes_ms)


@dataclass(frozen=True)
class AllPasses:
    """The passes of all kinds."""

    times: list[PassTimes]

    def ratio(self, one: PassTimes) -> float:
        """Return the time of a pass relative to one of a single token."""
        (single,) = where(self.times, method=one.method, context=one.context, whose=TEXT, tokens=1)
        return one.ms / single.ms


class Passes(Study):
    """What a pass over several tokens costs."""

    name = "passes"
    about = "time passes over several tokens of one text, or over one token of each of several sessions"
    protocol = (
        "Caches read random token ids. A pass then reads further tokens, with logits of all of them, and the cache "
        "takes them back. Passes of all sizes are interleaved: in each round, each size has one pass that is not timed "
        "and several that are. Figures are medians. Ratios compare with a pass over one token of one text."
    )
    found = AllPasses
    weights: ClassVar[str] = "auto"

    contexts: list[Count] = Field([64, 1024], min_length=1, description="tokens that are read before")
    tokens: Annotated[list[Count], rising] = Field([1, 2, 4, 8, 16], min_length=1, description="tokens of a pass")
    methods: Annotated[list[OwnMethod], Flag("--method", "-x")] = Field(
        ["full", "kv-direct"], min_length=1, description="methods to measure, exact ones"
    )
    budget: Annotated[BudgetText, Flag("--budget", "-b")] = Field("25%", description=BUDGET)
    sessions: bool = Field(True, description="measure passes over several sessions, too")
    rounds: int = Field(5, ge=1, description="number of rounds")
    passes: int = Field(4, ge=1, description="timed passes of each size in a round")

    @torch.no_grad()
    def measure(self, trial: Trial) -> AllPasses:
        found, sizes = AllPasses([]), sorted({1, *self.tokens})
        kinds = [(TEXT, tokens) for tokens in sizes] + [(SESSIONS, tokens) for tokens in sizes[1:] if self.sessions]
        with keeping(found, found.times):
            for number, (context, method) in enumerate(pairs := [*product(self.contexts, self.methods)]):
                caches = self._caches(trial, method, context, sizes[-1] if self.sessions else 1)
                mine = [PassTimes(method, context, *kind) for kind in kinds]
                for turn in range(self.rounds):
                    trial.progress(f"{method} at {context}", number + turn / self.rounds, len(pairs))
                    for one in mine:
                        one.passes_ms.extend(self._timed(trial, caches, one))
                found.times.extend(mine)
                for cache in caches:
                    cache.close()
        return found

    def _caches(self, trial: Trial, method: str, context: int, count: int) -> list[KeepCache]:
        """Return ``count`` caches that have read ``context`` tokens. Raises UsageError for a method without drafts."""
        limited = "budget" in resolve(method).options
        options: dict[str, Any] = {"budget": self.budget, "context": context} if limited else {}
        cache = new_cache(trial.model, method, **options)
        if not isinstance(cache, KeepCache) or not can_draft(cache):
            raise UsageError(
                f"Passes of '{method}' cannot be taken back with the same bits; use an exact method, and packed "
                "weights."
            )
        trial.model(random_ids(trial.model, context), cache=cache, use_cache=True, logits_to_keep=1)
        return [cache, *(cache.fork() for _ in range(count - 1))]

    def _timed(self, trial: Trial, caches: Sequence[KeepCache], one: PassTimes) -> list[float]:
        """Return the milliseconds of the passes of a round."""
        ids = random_ids(trial.model, one.tokens, seed=1)[0].tolist()
        if one.whose == TEXT:
            reads = [Read(caches[0], ids, keep=one.tokens)]
        else:
            reads = [Read(cache, [token]) for cache, token in zip(caches, ids, strict=False)]
        found = []
        for _ in range(1 + self.passes):
            for read in reads:
                expect_drafts(read.cache)
            start = time.perf_counter()
            results = forward(trial.model, reads)
            found.append(1e3 * (time.perf_counter() - start))
            for read, result in zip(reads, results, strict=True):
                if isinstance(result, Exception):
                    raise result
                take_back(read.cache, len(read.ids))
        return found[1:]

    def tables(self, found: AllPasses) -> list[Table]:
        sizes = each(found.times, "tokens")
        table = Table("Milliseconds of a pass, and × of one token", ["context", "cache", "tokens of", *map(str, sizes)])
        table.named = 3
        for context, method, whose in each(found.times, "context", "method", "whose"):
            mine = {one.tokens: one for one in where(found.times, context=context, method=method, whose=whose)}
            cells = [
                f"{fixed(one.ms, 1)}, {times(found.ratio(one))}" if (one := mine.get(tokens)) is not None else ""
                for tokens in sizes
            ]
            table.rows.append([f"{context:,}", f"`{method}`", whose, *cells])
        return [table]
