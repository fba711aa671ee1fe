"""What is simulated: a fleet, who asks it, and how its requests are routed."""

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
"""Times the mean of all answers under way that a replica has at most, where loads are bounded."""


@dataclass(frozen=True)
class Scenario:
    """A fleet and who asks it. Seconds, tokens, bytes.

    rate: new sessions a second, at each replica. burst: instead, so many at once, and as many more when all of them
    have ended. turns: of a session, on the mean (geometric). first, prompt, answer: tokens of the first prompt, of the
    later ones and of answers, means of exponentials, or the numbers themselves where lengths are ``fixed``. think: mean
    between an answer and the next turn. route: ``hash`` (consistent hashing of sessions), ``bounded`` (the same, past
    replicas that have more than BOUND times the mean), ``least`` (the fewest answers under way). recall: whether a
    session comes back from the disk, by reading its text again, or by what is faster. disk: bytes a second of all
    replicas together; link: of one. mtbf: mean time until a replica fails, None for never; restart: until it is back;
    notice: until clients ask elsewhere. seconds: that are simulated, the first ``warmup`` of them not counted.
    """

    replicas: int = 8
    rate: float = 0.05
    burst: int = 0
    turns: float = 8.0
    first: float = 2000.0
    prompt: float = 200.0
    answer: float = 300.0
    think: float = 30.0
    fixed: bool = False
    route: Route = "hash"
    recall: Recall = "fetch"
    disk: float = 20e9
    link: float = 12.5e9
    mtbf: float | None = None
    restart: float = 60.0
    notice: float = 1.0
    seconds: float = 600.0
    warmup: float = 120.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError for what cannot be simulated."""
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
