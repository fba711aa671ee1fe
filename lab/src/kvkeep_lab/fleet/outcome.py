"""What came of a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_GRAIN = 200  # buckets of gaps for each factor of e: half a per cent wide


@dataclass(frozen=True)
class FleetOutcome:
    """What came of it, after the warm-up. before: answers under way when it ended. asked: for an answer, refused: of
    those, for which a session has no room, in its tokens or in a replica's memory; it ends there. left: answers under
    way at the end. So before + asked is answered + refused + left. first_token, recovered: seconds at the 50th, 95th
    and 99th percentile, until the first token of a turn, and from a failure until the first token of a client's next
    try; until the end, where there is none yet. gap: the same between tokens. None where there were none. turns: by how
    their past came there. in_system: answers under way, on the mean; answer_s: mean seconds of one from its request to
    its last token. busy: share of time that replicas work. writing: sessions that share a step, on the mean of busy
    time. events: how many were simulated."""

    before: int
    asked: int
    answered: int
    refused: int
    left: int
    failures: int
    first_token: tuple[float, float, float] | None
    gap: tuple[float, float, float] | None
    recovered: tuple[float, float, float] | None
    tokens_s: float
    turns: dict[str, int]
    read_bytes_s: float
    written_bytes_s: float
    in_system: float
    answer_s: float
    busy: float
    writing: float
    events: int

    def share(self, how: str) -> float:
        """Return the share of turns whose past came there so."""
        return self.turns.get(how, 0) / max(1, sum(self.turns.values()))

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain types."""
        return asdict(self)


def percentiles(values: Iterable[float]) -> tuple[float, float, float] | None:
    """Return the 50th, 95th and 99th percentile, None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    fifty, high, highest = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99))
    return fifty, high, highest


def bucket(rate: float) -> int:
    """Return the bucket of the gaps between tokens of an answer that is written at ``rate`` a second."""
    return round(-_GRAIN * math.log(rate))


def spread(gaps: Mapping[int, float]) -> tuple[float, float, float] | None:
    """Return the same of the seconds of gaps, of which there are so many in each :func:`bucket`."""
    total, past, found = sum(gaps.values()), 0.0, list[float]()
    for number, count in sorted(gaps.items()):
        past += count
        while len(found) < 3 and past >= (0.5, 0.95, 0.99)[len(found)] * total:
            found.append(math.exp(number / _GRAIN))
    return (found[0], found[1], found[2]) if len(found) == 3 else None
