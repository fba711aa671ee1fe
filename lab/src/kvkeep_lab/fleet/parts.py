"""The parts of a fleet: clocks of jobs with equal speed, sessions, replicas, transfers, and the hash ring."""

from __future__ import annotations

import math
from bisect import bisect
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any, NamedTuple

POINTS = 64
"""Number of points of each replica on the ring of consistent hashing."""


class Clock:
    """Jobs with equal speed. done: work of each job since the start of the clock; it grows by ``rate`` per second."""

    __slots__ = ("at", "done", "jobs", "rate")

    def __init__(self) -> None:
        self.done = self.at = self.rate = 0.0
        self.jobs: list[tuple[float, int, Any]] = []

    def advance(self, now: float) -> None:
        """Advance to ``now``."""
        self.done += self.rate * (now - self.at)
        self.at = now

    def add(self, work: float, order: int, job: Any) -> None:
        """Start a job. Jobs that end at the same time end in the order of ``order``."""
        heappush(self.jobs, (self.done + work, order, job))

    @property
    def next(self) -> float:
        """Time at which the first job ends if nothing changes."""
        return self.at + max(0.0, self.jobs[0][0] - self.done) / self.rate if self.jobs else math.inf

    def ended(self) -> Any:
        """Remove and return the job that ends first, which is complete."""
        finish, _, job = heappop(self.jobs)
        self.done = max(self.done, finish)  # corrects rounding errors
        return job


class SimulatedSession:
    """One conversation: ``past`` tokens of complete turns, and the current turn."""

    __slots__ = ("answer", "answered", "arrived", "fetched", "grant", "hash", "home", "lost", "new", "number", "past")

    def __init__(self, number: int) -> None:
        self.number, self.hash, self.past = number, _hashed(f"session {number}"), 0
        self.new = self.answer = 0
        self.arrived = self.grant = 0.0
        self.answered = False  # whether this turn has its first token
        self.lost: float | None = None  # time at which a failed try lost its answer
        self.home: SimulatedReplica | None = None  # replica that has the idle session in memory


class SimulatedReplica:
    """One server: its waiting, reading, writing and idle sessions."""

    __slots__ = (
        *("busy", "fetching", "granted", "idle", "idle_bytes", "life", "load", "number", "pasts", "reading", "seen"),
        *("up", "version", "waiting", "writing", "written"),
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.life = self.version = self.load = 0
        self.up = self.seen = True  # seen: the router's state
        self.busy = self.written = 0.0  # in seconds, and in sessions times seconds
        self.clear(0.0)

    def clear(self, now: float) -> None:
        """Remove all sessions."""
        self.waiting: deque[SimulatedSession] = deque()
        self.fetching: deque[SimulatedSession] = deque()  # the first is in transit
        self.reading, self.writing = Clock(), Clock()
        self.reading.at = self.writing.at = now
        self.idle: OrderedDict[int, SimulatedSession] = OrderedDict()  # least recently used first
        self.granted = self.idle_bytes = 0.0  # bytes of answers and of idle sessions
        self.pasts = 0.0  # seconds per step for the pasts of writing sessions

    @property
    def sessions(self) -> list[SimulatedSession]:
        """Sessions with an answer in progress."""
        clocks = (job[2] for clock in (self.reading, self.writing) for job in clock.jobs)
        return [*self.waiting, *self.fetching, *clocks]


class Transfer(NamedTuple):
    """Bytes in transit to a replica, while it is alive, or to the disk."""

    size: float
    replica: SimulatedReplica | None = None
    life: int = 0


class HashRing:
    """Consistent hashing: every replica has POINTS places on a ring, and a session belongs to the next place."""

    def __init__(self, replicas: Sequence[SimulatedReplica]) -> None:
        points = sorted(
            (_hashed(f"replica {one.number} {point}"), one.number) for one in replicas for point in range(POINTS)
        )
        self.hashes = [place for place, _ in points]
        self.owners = [replicas[number] for _, number in points]

    def pick(self, place: int, limit: float = math.inf) -> SimulatedReplica | None:
        """Return the first available replica from ``place`` on with fewer than ``limit`` answers; without one, the
        first available replica."""
        start, count, first = bisect(self.hashes, place), len(self.owners), None
        for step in range(count):
            one = self.owners[(start + step) % count]
            if one.seen:
                if one.load < limit:
                    return one
                first = first or one
        return first


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
