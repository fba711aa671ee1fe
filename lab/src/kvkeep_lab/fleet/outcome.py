"""The outcome of a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_GRAIN = 200  # buckets of gaps per factor of e; each is half a percent wide


@dataclass(frozen=True)
class FleetOutcome:
    """The outcome after the warm-up, with before + asked = answered + refused + left. Percentiles are the 50th, 95th
    and 99th, in seconds; None without values."""

    before: int
    """Answers in progress at the end of the warm-up."""
    asked: int
    """Requested answers."""
    answered: int
    refused: int
    """Requested answers that do not fit in the session's tokens or in a replica's memory; the session then ends."""
    left: int
    """Answers in progress at the end."""
    failures: int
    first_token: tuple[float, float, float] | None
    """Percentiles of the time to the first token of a turn."""
    gap: tuple[float, float, float] | None
    """Percentiles of the time between tokens."""
    recovered: tuple[float, float, float] | None
    """Percentiles of the time from a failure to the first token of a client's next try, or to the end if there is
    none."""
    tokens_s: float
    turns: dict[str, int]
    """Turns by the way in which their past became available."""
    read_bytes_s: float
    written_bytes_s: float
    in_system: float
    """Mean number of answers in progress."""
    answer_s: float
    """Mean seconds of an answer from its request to its last token."""
    busy: float
    """Share of time in which replicas work."""
    writing: float
    """Mean number of sessions that share a step, over busy time."""
    events: int
    """Number of simulated events."""

    def share(self, how: str) -> float:
        """Return the share of turns whose past became available by ``how``."""
        return self.turns.get(how, 0) / max(1, sum(self.turns.values()))

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain types."""
        return asdict(self)


def percentiles(values: Iterable[float]) -> tuple[float, float, float] | None:
    """Return the 50th, 95th and 99th percentile; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    fifty, high, highest = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99))
    return fifty, high, highest


def bucket(rate: float) -> int:
    """Return the bucket of the gaps between tokens of an answer generated at ``rate`` tokens per second."""
    return round(-_GRAIN * math.log(rate))


def spread(gaps: Mapping[int, float]) -> tuple[float, float, float] | None:
    """Return the percentiles of gaps in seconds, given the number of gaps in each :func:`bucket`."""
    total, past, found = sum(gaps.values()), 0.0, list[float]()
    for number, count in sorted(gaps.items()):
        past += count
        while len(found) < 3 and past >= (0.5, 0.95, 0.99)[len(found)] * total:
            found.append(math.exp(number / _GRAIN))
    return (found[0], found[1], found[2]) if len(found) == 3 else None
