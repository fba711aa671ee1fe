"""An event simulation of a fleet of replicas: sessions arrive, are routed, wait, are fetched and answered, and return
after a pause.

Events change rates. Rates are constant between events, so single tokens need no events. A replica works like the engine
(:mod:`kvkeep.serve.engine`): a step generates one token of every writing session, and reads a chunk of one of the
reading sessions in turn. All writing sessions therefore advance at one rate, and all reading sessions at another. Each
of the two groups is a clock (:class:`~kvkeep_lab.fleet.parts.Clock`), and a job ends when its clock has done its work.

Memory is granted in the order of requests. If memory is short, the least recently used idle sessions are removed from
it. At the end of an answer, its turn is written to a disk that all replicas share. If a session's next turn goes to
another replica, or if the session was removed from memory, it is fetched from the disk, or its text is read again.

A replica that fails loses its memory and all its answers. Clients retry after the router has detected the failure.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any

from kvkeep.errors import UsageError
from kvkeep_lab.fleet.outcome import FleetOutcome, bucket, percentiles, spread
from kvkeep_lab.fleet.pace import ReplicaPace
from kvkeep_lab.fleet.parts import Clock, HashRing, SimulatedReplica, SimulatedSession, Transfer
from kvkeep_lab.fleet.scenario import BOUND, Scenario

_OUTDATED = 8  # entries of the heap per replica before it is rebuilt


class Simulation:
    """A simulation by events in order of time. Call :meth:`run` once."""

    def __init__(self, pace: ReplicaPace, scenario: Scenario) -> None:
        tokens = scenario.first + scenario.answer
        if tokens > pace.longest:
            raise UsageError(
                f"A first turn of {tokens:,.0f} tokens exceeds the longest session, {pace.longest:,}; give fewer."
            )
        if pace.granted(tokens) > pace.memory:
            raise UsageError(
                f"A first turn of {tokens:,.0f} tokens exceeds a replica's memory; give a shorter --first or more "
                "--memory."
            )
        self.pace, self.scenario = pace, scenario
        self.random = Random(scenario.seed)
        self.replicas = [SimulatedReplica(number) for number in range(scenario.replicas)]
        self.ring = HashRing(self.replicas)
        self.there = scenario.replicas  # number of available replicas known to the router
        self.disk, self.disk_version = Clock(), 0
        self.retrying: set[SimulatedSession] = set()
        self.now, self.order, self.load, self.number, self.alive = 0.0, 0, 0, 0, 0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._least: list[tuple[int, float, SimulatedReplica]] = []  # heap by load; skips outdated loads
        self._step_s: dict[int, float] = {}
        self._chunk_s = pace.reading(pace.chunk, pace.chunk)  # a chunk in a step that reads the weights anyway
        self._reset()

    def _reset(self) -> None:
        self.requests = self.answered = self.refused = self.failures = 0
        self.before = self.load
        self.turns: Counter[str] = Counter()
        self.first_token, self.recovered = array("d"), array("d")
        self.gaps: defaultdict[int, float] = defaultdict(float)
        self.read_bytes = self.written_bytes = self.area = self.lived = 0.0
        self.since = self._changed = self.now
        for one in self.replicas:
            one.busy = one.written = 0.0

    def run(self, progress: Callable[[float], None] = lambda now: None) -> FleetOutcome:
        """Simulate, and return the outcome. progress: called at intervals with the simulated seconds."""
        given = self.scenario
        for replica in self.replicas:
            self._count(replica, 0)
            self._schedule_failure(replica)
        if given.burst:
            self._at(0.0, self._burst, None)
        else:
            self._at(self._exponential(1 / (given.rate * given.replicas)), self._arrive, None)
        events, warm, shown = self._events, not given.warmup, 0
        while events[0][0] <= given.seconds:
            if not warm and events[0][0] >= given.warmup:
                self.now, warm = given.warmup, True
                for replica in self.replicas:
                    self._advance(replica)
                self._area()
                self._reset()
            self.now, _, act, about = heappop(events)
            act(about)
            shown += 1
            if not shown % 4096:
                progress(self.now)
        self.now = given.seconds
        for replica in self.replicas:
            self._advance(replica)
        self._area()
        return self._outcome(shown)

    def _outcome(self, events: int) -> FleetOutcome:
        span = self.now - self.since
        for session in self.retrying.union(*(replica.sessions for replica in self.replicas)):
            if not session.answered and session.arrived >= self.since:
                self.first_token.append(self.now - session.arrived)
            if session.lost is not None and session.lost >= self.since:
                self.recovered.append(self.now - session.lost)
        busy = sum(replica.busy for replica in self.replicas)
        return FleetOutcome(
            before=self.before,
            asked=self.requests,
            answered=self.answered,
            refused=self.refused,
            left=self.load,
            failures=self.failures,
            first_token=percentiles(self.first_token),
            gap=spread(self.gaps),
            recovered=percentiles(self.recovered),
            tokens_s=sum(self.gaps.values()) / span,
            turns=dict(sorted(self.turns.items())),
            read_bytes_s=self.read_bytes / span,
            written_bytes_s=self.written_bytes / span,
            in_system=self.area / span,
            answer_s=self.lived / max(1, self.answered),
            busy=busy / span / len(self.replicas),
            writing=sum(replica.written for replica in self.replicas) / busy if busy else 0.0,
            events=events,
        )

    # -- time and chance ----------------------------------------------------------------------------

    def _at(self, when: float, act: Callable[[Any], None], about: Any) -> None:
        self.order += 1
        heappush(self._events, (when, self.order, act, about))

    def _exponential(self, mean: float) -> float:
        return self.random.expovariate(1 / mean) if mean else 0.0

    def _length(self, mean: float) -> int:
        return max(1, round(mean if self.scenario.fixed else self._exponential(mean)))

    # -- sessions -----------------------------------------------------------------------------------

    def _arrive(self, _: None) -> None:
        given = self.scenario
        self._at(self.now + self._exponential(1 / (given.rate * given.replicas)), self._arrive, None)
        self._come()

    def _burst(self, _: None) -> None:
        self.alive += self.scenario.burst  # counted before any of them ends
        for _each in range(self.scenario.burst):
            self._come()

    def _come(self) -> None:
        self.number += 1
        self._ask(SimulatedSession(self.number))

    def _ask(self, session: SimulatedSession) -> None:
        """Begin a turn of a session, if the session has space for it."""
        given = self.scenario
        session.new = self._length(given.prompt if session.past else given.first)
        session.answer = self._length(given.answer)
        tokens = session.past + session.new + session.answer
        self.requests += 1
        if tokens > self.pace.longest or self.pace.granted(tokens) > self.pace.memory:
            self.refused += 1
            self._forget(session)
            return
        session.arrived, session.answered, session.lost = self.now, False, None
        self._area()
        self.load += 1
        self._send(session)

    def _send(self, session: SimulatedSession) -> None:
        """Route a turn."""
        self.retrying.discard(session)
        replica = self._route(session)
        if replica is None or not replica.up:
            self._retry(session)
            return
        self._count(replica, 1)
        replica.waiting.append(session)
        self._advance(replica)
        self._admit(replica)
        self._refresh(replica)

    def _route(self, session: SimulatedSession) -> SimulatedReplica | None:
        route = self.scenario.route
        if route == "hash":
            return self.ring.pick(session.hash)
        if route == "bounded":
            return self.ring.pick(session.hash, math.ceil(BOUND * self.load / max(1, self.there)))
        while self._least:
            load, _, replica = self._least[0]
            if replica.seen and replica.load == load:
                return replica
            heappop(self._least)
        return None

    def _count(self, replica: SimulatedReplica, more: int) -> None:
        """Change a replica's number of answers by ``more``."""
        replica.load += more
        if self.scenario.route != "least":
            return
        if len(self._least) < _OUTDATED * len(self.replicas):
            heappush(self._least, (replica.load, self.random.random(), replica))
        else:
            self._least = [(one.load, self.random.random(), one) for one in self.replicas if one.seen]
            heapify(self._least)

    def _retry(self, session: SimulatedSession) -> None:
        """Schedule a retry of the client after the router has detected the failure."""
        self.retrying.add(session)
        self._at(self.now + self.scenario.notice, self._send, session)

    def _forget(self, session: SimulatedSession) -> None:
        """End a session."""
        if session.home is not None:
            self._leave(session.home, session)
        if self.scenario.burst:
            self.alive -= 1
            if not self.alive:
                self._at(self.now, self._burst, None)

    def _leave(self, replica: SimulatedReplica, session: SimulatedSession) -> None:
        """Remove an idle session from memory; its file remains."""
        del replica.idle[session.number]
        replica.idle_bytes -= self.pace.held(session.past)
        session.home = None

    def _area(self) -> None:
        self.area += self.load * (self.now - self._changed)
        self._changed = self.now

    # -- one replica --------------------------------------------------------------------------------

    def _admit(self, replica: SimulatedReplica) -> None:
        """Admit waiting sessions in order while memory is available."""
        pace = self.pace
        while replica.waiting:
            session = replica.waiting[0]
            need = pace.granted(session.past + session.new + session.answer)
            if need > pace.memory - replica.granted:
                return
            replica.waiting.popleft()
            here = session.home is replica
            if session.home is not None:  # idle in memory, here or at another replica
                self._leave(session.home, session)
            while need > pace.memory - replica.granted - replica.idle_bytes and replica.idle:
                self._leave(replica, next(iter(replica.idle.values())))
            session.grant = need
            replica.granted += need
            self._begin(replica, session, here)

    def _begin(self, replica: SimulatedReplica, session: SimulatedSession, here: bool) -> None:
        """Begin an answer with reserved memory: its past is present, is fetched, or is recomputed."""
        if not session.past or here:
            self.turns["in memory" if here else "new"] += 1
            self._read(replica, session, session.past)
        elif self._fetches(session):
            self.turns["fetched"] += 1
            replica.fetching.append(session)
            if len(replica.fetching) == 1:
                self._fetch(replica)
        else:
            self.turns["read again"] += 1
            self._read(replica, session, 0)

    def _fetches(self, session: SimulatedSession) -> bool:
        """Return whether a past is fetched instead of recomputed."""
        given = self.scenario
        if given.recall != "faster":
            return given.recall == "fetch"
        rate = min(given.link, given.disk / (len(self.disk.jobs) + 1))
        return self.pace.stored(session.past) / rate < self.pace.reading(0, session.past)

    def _read(self, replica: SimulatedReplica, session: SimulatedSession, past: int) -> None:
        """Begin to read the tokens after the first ``past`` ones."""
        self.order += 1
        replica.reading.add(self.pace.reading(past, session.past - past + session.new), self.order, session)

    def _advance(self, replica: SimulatedReplica) -> None:
        """Advance a replica to the present, and count the tokens generated since."""
        passed, writing = self.now - replica.writing.at, len(replica.writing.jobs)
        if passed > 0:
            if writing:
                rate = replica.writing.rate
                self.gaps[bucket(rate)] += writing * rate * passed
                replica.written += writing * passed
            if writing or replica.reading.jobs:
                replica.busy += passed
        replica.reading.advance(self.now)
        replica.writing.advance(self.now)

    def _refresh(self, replica: SimulatedReplica) -> None:
        """Set the rates by the current sessions, and schedule the next end of a job."""
        reading, writing = replica.reading, replica.writing
        read, written = len(reading.jobs), len(writing.jobs)
        step = 0.0
        if written:
            if written not in self._step_s:
                self._step_s[written] = self.pace.step(written)
            step = self._step_s[written] + replica.pasts
        whole_s = step + self._chunk_s if read else step
        writing.rate = 1 / whole_s if written else 0.0
        reading.rate = (self._chunk_s / whole_s if written else 1.0) / read if read else 0.0
        replica.version += 1
        if read or written:
            self._at(min(reading.next, writing.next), self._work, (replica, replica.version))

    def _work(self, about: tuple[SimulatedReplica, int]) -> None:
        """Handle the end of a prompt or an answer."""
        replica, version = about
        if replica.version != version:
            return
        reads = replica.reading.next <= replica.writing.next
        self._advance(replica)
        if reads:
            self._write(replica, replica.reading.ended())
        else:
            self._end(replica, replica.writing.ended())
        self._refresh(replica)

    def _write(self, replica: SimulatedReplica, session: SimulatedSession) -> None:
        """Handle the end of a prompt, which yields the first token."""
        if not session.answered:
            session.answered = True
            if session.arrived >= self.since:
                self.first_token.append(self.now - session.arrived)
        if session.lost is not None:
            if session.lost >= self.since:
                self.recovered.append(self.now - session.lost)
            session.lost = None
        replica.pasts += self._past_s(session)
        self.order += 1
        replica.writing.add(session.answer - 1, self.order, session)

    def _past_s(self, session: SimulatedSession) -> float:
        """Return the mean seconds per step for attention to a session's past during its answer."""
        return self.pace.past(session.past + session.new + session.answer / 2)

    def _end(self, replica: SimulatedReplica, session: SimulatedSession) -> None:
        """Handle the end of an answer: save its turn to the disk, and make the session idle."""
        pace, given = self.pace, self.scenario
        replica.pasts -= self._past_s(session)
        if not replica.writing.jobs:
            replica.pasts = 0.0  # clears rounding errors
        replica.granted -= session.grant
        before, session.past = session.past, session.past + session.new + session.answer
        self._transfer(Transfer(pace.stored(session.past - before)))
        replica.idle[session.number], session.home = session, replica
        replica.idle_bytes += pace.held(session.past)
        self._area()
        self.load -= 1
        self.answered += 1
        self.lived += self.now - session.arrived
        self._count(replica, -1)
        if self.random.random() < 1 / given.turns:
            self._forget(session)
        else:
            self._at(self.now + self._exponential(given.think), self._ask, session)
        self._admit(replica)

    # -- the disk that all share --------------------------------------------------------------------

    def _fetch(self, replica: SimulatedReplica) -> None:
        """Fetch the first waiting session."""
        self._transfer(Transfer(self.pace.stored(replica.fetching[0].past), replica, replica.life))

    def _transfer(self, transfer: Transfer) -> None:
        self.order += 1
        self.disk.advance(self.now)
        self.disk.add(transfer.size, self.order, transfer)
        self._share()

    def _share(self) -> None:
        """Share the rate of the disk equally between transfers, limited by the link."""
        jobs = len(self.disk.jobs)
        self.disk_version += 1
        if jobs:
            self.disk.rate = min(self.scenario.link, self.scenario.disk / jobs)
            self._at(self.disk.next, self._moved, self.disk_version)

    def _moved(self, version: int) -> None:
        """Handle the end of the first transfer."""
        if version != self.disk_version:
            return
        self.disk.advance(self.now)
        moved: Transfer = self.disk.ended()
        self._share()
        replica = moved.replica
        if replica is None:
            self.written_bytes += moved.size
            return
        self.read_bytes += moved.size
        if replica.life != moved.life:  # the replica has failed
            return
        session = replica.fetching.popleft()
        self._advance(replica)
        self._read(replica, session, session.past)
        if replica.fetching:
            self._fetch(replica)
        self._refresh(replica)

    # -- failures -----------------------------------------------------------------------------------

    def _schedule_failure(self, replica: SimulatedReplica) -> None:
        if self.scenario.mtbf is not None:
            self._at(self.now + self._exponential(self.scenario.mtbf), self.fail, replica)

    def fail(self, replica: SimulatedReplica) -> None:
        """Fail a replica, which loses everything except its files."""
        self._advance(replica)
        self.failures += 1
        replica.up = False
        replica.life += 1
        replica.version += 1
        for session in replica.idle.values():
            session.home = None
        self._at(self.now + self.scenario.notice, self._notice, (replica, replica.life))  # scheduled before the retries
        for session in replica.sessions:
            session.lost = self.now if session.lost is None else session.lost
            self._retry(session)
        self._count(replica, -replica.load)
        replica.clear(self.now)
        self._at(self.now + self.scenario.restart, self._restart, replica)

    def _notice(self, about: tuple[SimulatedReplica, int]) -> None:
        replica, life = about
        if replica.life == life and not replica.up:
            replica.seen = False
            self.there -= 1

    def _restart(self, replica: SimulatedReplica) -> None:
        self.there += not replica.seen
        replica.up = replica.seen = True
        self._count(replica, 0)
        self._schedule_failure(replica)


def simulate(
    pace: ReplicaPace, scenario: Scenario, progress: Callable[[float], None] = lambda now: None
) -> FleetOutcome:
    """Return the outcome of a scenario; equal seeds give equal outcomes."""
    return Simulation(pace, scenario).run(progress)
