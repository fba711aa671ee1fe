"""The scenario of a simulation: a fleet, its load, and the routing of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from kvkeep.errors import UsageError

Route = Literal["hash", "bounded", "least"]
Recall = Literal["fetch", "read", "faster"]
ROUTES: tuple[Route, ...] = get_args(Route)
RECALLS: tuple[Recall, ...] = get_args(Recall)

BOUND = 1.25
"""Maximum load of a replica with bounded loads, relative to the mean number of answers in progress."""


@dataclass(frozen=True)
class Scenario:
    """A fleet and its load. Units are seconds, tokens and bytes."""

    replicas: int = 8
    rate: float = 0.05
    """New sessions per second and replica."""
    burst: int = 0
    """If not 0, replaces ``rate``: number of sessions that start at the same time. The same number starts when all have
    ended."""
    turns: float = 8.0
    """Mean turns of a session (geometric)."""
    first: float = 2000.0
    """Mean tokens of the first prompt (exponential)."""
    prompt: float = 200.0
    """Mean tokens of later prompts (exponential)."""
    answer: float = 300.0
    """Mean tokens of answers (exponential)."""
    think: float = 30.0
    """Mean time between an answer and the next turn."""
    fixed: bool = False
    """Whether lengths equal their means."""
    route: Route = "hash"
    """``hash`` (consistent hashing of sessions), ``bounded`` (the same, without replicas above BOUND times the mean
    load), or ``least`` (fewest answers in progress)."""
    recall: Recall = "fetch"
    """Whether a session is read from the disk, recomputed from its text, or recalled by the faster way."""
    disk: float = 20e9
    """Bytes per second of the disk that all replicas share."""
    link: float = 12.5e9
    """Bytes per second of one replica's network."""
    mtbf: float | None = None
    """Mean time between failures of a replica; None for no failures."""
    restart: float = 60.0
    """Time until a failed replica is available again."""
    notice: float = 1.0
    """Time until clients retry at another replica."""
    seconds: float = 600.0
    """Simulated seconds."""
    warmup: float = 120.0
    """Seconds at the beginning that are not counted."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid scenario."""
        above = {name: getattr(self, name) for name in ("replicas", "rate", "disk", "link", "notice", "seconds")}
        above |= {"mtbf": self.mtbf} if self.mtbf is not None else {}
        ones = {name: getattr(self, name) for name in ("turns", "first", "prompt", "answer")}
        others = {name: getattr(self, name) for name in ("burst", "think", "restart", "warmup")}
        for least, named in ((0, above), (1, ones), (0, others)):
            for name, value in named.items():
                if not math.isfinite(value) or value < least or (named is above and not value):
                    bound = "above 0" if named is above else f"from {least} on"
                    raise UsageError(f"The '{name}' of a fleet is a finite number {bound}, not {value:g}.")
        if self.warmup >= self.seconds:
            raise UsageError(
                "The warm-up has to be shorter than the simulated time; give a shorter --warmup or more --seconds."
            )
