"""The simulated fleet, against single turns by hand, queueing formulas, conservation laws and hash rings."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvkeep_lab.cli.capacity import CACHES
from kvkeep_lab.fleet.pace import PiecewiseLine, ReplicaPace
from kvkeep_lab.fleet.parts import HashRing, SimulatedReplica, SimulatedSession
from kvkeep_lab.fleet.scenario import BOUND, Scenario
from kvkeep_lab.fleet.simulation import Simulation, simulate
from transformers import AutoConfig

from kvkeep.errors import UsageError
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.costs import cost
from kvkeep.plan.machine import Machine
from kvkeep.plan.planner import ACCEPTANCE
from kvkeep.plan.shape import shape_of
from kvkeep.plan.sizes import grant, sizes

MACHINES = Path(__file__).parents[2] / "docs" / "machines"
STEP = 1e-3
NONE, PROPORTIONAL = PiecewiseLine(((0, 0.0),)), PiecewiseLine(((0, 0.0), (1, 1.0)))
SHARED = ReplicaPace(
    "a processor that is shared", PiecewiseLine(((1, STEP), (2, 2 * STEP))), NONE, NONE, NONE, NONE, NONE, 1e18
)
"""Any number of sessions write together as many tokens a second as one: each has its share. A prompt is one step."""

BUSY = ReplicaPace(
    "a small replica", step=PiecewiseLine(((1, 2e-3), (8, 4e-3))), past=PiecewiseLine(((0, 0.0), (1000, 1e-4))),
    prompt=PiecewiseLine(((0, 0.0), (1000, 0.1), (9000, 1.0))), held=PROPORTIONAL,
    granted=PiecewiseLine(((0, 100.0), (1000, 1200.0))),
    stored=PROPORTIONAL, memory=13_000.0, longest=9_000,
)  # fmt: skip
HARD = Scenario(
    replicas=4, rate=0.5, think=2.0, disk=30e3, link=20e3, mtbf=20.0, restart=3.0, notice=0.5, seconds=120, warmup=20,
)  # fmt: skip


@pytest.mark.parametrize("fixed", [True, False], ids=["M/D/1", "M/M/1"])
def test_one_replica_behaves_as_the_textbook_queue(fixed: bool) -> None:
    """Processor sharing: the mean stay is E[S] / (1 - rho) for any distribution of lengths."""
    served, load = 201 * STEP, 0.7  # the prompt, and a step for each token but the first
    given = Scenario(1, load / served, turns=1, first=1, answer=201, fixed=fixed, disk=1e18, link=1e18, seconds=4000)
    found = simulate(SHARED, given)
    assert found.answered > 10_000
    assert found.answer_s == pytest.approx(served / (1 - load), rel=0.04)
    assert found.busy == pytest.approx(load, rel=0.03) and found.in_system == pytest.approx(load / (1 - load), rel=0.06)


class Logged(Simulation):
    """Notes of every answer how its past came, its tokens, and the seconds from when it was let in to its end."""

    def __init__(self, pace: ReplicaPace, scenario: Scenario) -> None:
        super().__init__(pace, scenario)
        self.log: list[tuple[str, int, float]] = []
        self.begun: tuple[str, int, float] = "", 0, 0.0

    def _begin(self, replica: SimulatedReplica, session: SimulatedSession, here: bool) -> None:
        before = Counter(self.turns)
        super()._begin(replica, session, here)
        ((how, _),) = (self.turns - before).items()
        self.begun = how, session.past, self.now

    def _end(self, replica: SimulatedReplica, session: SimulatedSession) -> None:
        how, past, begun = self.begun
        self.log.append((how, past, self.now - begun))
        super()._end(replica, session)


def test_the_time_of_an_answer_is_the_sum_of_its_parts() -> None:
    """One session at a time; its replica fails once, so that the past is fetched or read again."""
    pace = replace(BUSY, memory=1e9, longest=10**9, stored=PiecewiseLine(((0, 0.0), (1000, 1000.0), (2000, 1800.0))))
    given = Scenario(
        1, 1e-9, turns=1e9, first=1000, prompt=100, answer=51, think=0.2, fixed=True, disk=1e4, link=5e3, seconds=20,
        warmup=0, notice=0.5, restart=2.0,
    )  # fmt: skip
    ways = (
        ("fetch", 5e3, "fetched"),
        ("read", 5e3, "read again"),
        ("faster", 5e3, "read again"),
        ("faster", 1e9, "fetched"),
    )
    for recall, link, again in ways:
        one = Logged(pace, replace(given, recall=recall, link=link, disk=1e10))  # type: ignore[arg-type]
        one._ask(SimulatedSession(1))
        one._at(5.0, one.fail, one.replicas[0])
        found = one.run()
        assert found.turns[again] == found.turns["new"] == found.failures == 1 and found.turns["in memory"] > 5
        assert len(one.log) == found.answered
        for how, past, elapsed in one.log:
            new = 100 if past else 1000
            read = pace.reading(0, past + new) if how == "read again" else pace.reading(past, new)
            fetch = pace.stored(past) / link if how == "fetched" else 0.0
            written = 50 * (pace.step(1) + pace.past(past + new + 51 / 2))
            assert elapsed == pytest.approx(fetch + read + written), (how, past)


def test_sessions_and_memory_are_conserved_when_replicas_fail() -> None:
    """Little memory, a slow disk and failures: answers, memory, Little's law, and the seed."""
    for route in ("hash", "bounded", "least"):
        one = Simulation(BUSY, replace(HARD, route=route, warmup=0))
        admit, granted = one._admit, list[float]()

        def watched(replica: object, admit: Callable[..., None] = admit, granted: list[float] = granted) -> None:
            admit(replica)
            granted.append(replica.granted + replica.idle_bytes)  # type: ignore[attr-defined]

        one._admit = watched  # type: ignore[method-assign]
        found = one.run()
        where = Counter(session for replica in one.replicas for session in replica.sessions) + Counter(one.retrying)
        assert max(where.values()) == 1 and len(where) == found.left == one.load
        assert found.asked == found.answered + found.refused + found.left and found.refused and not found.before
        assert found.failures > 5 and found.recovered is not None and min(found.turns.values()) > 5
        assert set(found.turns) == {"new", "in memory", "fetched"} and 0.5 * BUSY.memory < max(granted) <= BUSY.memory
        for replica in one.replicas:
            assert replica.idle_bytes == pytest.approx(sum(BUSY.held(idle.past) for idle in replica.idle.values()))
            assert all(idle.home is replica for idle in replica.idle.values())
            let_in = set(replica.sessions) - set(replica.waiting)
            assert replica.granted == pytest.approx(sum(session.grant for session in let_in))
        under_way = sum(HARD.seconds - session.arrived for session in where)
        assert found.in_system * HARD.seconds == pytest.approx(found.answered * found.answer_s + under_way)  # Little's
        again = simulate(BUSY, replace(HARD, route=route, warmup=0))
        assert again == found != simulate(BUSY, replace(HARD, route=route, warmup=0, seed=1))


def test_the_ring_moves_only_the_sessions_of_a_dead_replica() -> None:
    one = Simulation(SHARED, Scenario(replicas=10))
    ring, places = HashRing(one.replicas), [SimulatedSession(number).hash for number in range(4000)]
    before = [ring.pick(place) for place in places]
    one.replicas[3].seen = False
    after = [ring.pick(place) for place in places]
    moved = [was for was, now in zip(before, after, strict=True) if was is not now]
    assert set(moved) == {one.replicas[3]} and None not in after
    assert len(moved) == before.count(one.replicas[3]) == pytest.approx(400, rel=0.35)
    one.replicas[5].load = 100
    assert all(ring.pick(place, 100 * BOUND) is now for place, now in zip(places, after, strict=True))
    assert one.replicas[5] not in [ring.pick(place, 100) for place in places]
    for replica in one.replicas:
        replica.seen = False
    assert ring.pick(places[0]) is None


def test_the_fleet_command_prints_a_row_for_each_setting(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    path = tmp_path / "pace.json"
    path.write_text(json.dumps(BUSY.as_dict()))
    small = ("--rate", "0.5", "--seconds", "40", "--warmup", "10", "--disk", "1MB", "--link", "0.01", "--mtbf", "60")
    common = ("lab", "fleet", "--pace", str(path), "--replicas", "1,3", "--route", "hash,least", *small)
    code, out, err = run(*common, "--recall", "faster,read", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert ReplicaPace.of(found["pace"]) == BUSY
    assert [(row["replicas"], row["route"], row["recall"]) for row in found["rows"][:3]] == [
        (1, "hash", "faster"), (1, "hash", "read"), (1, "least", "faster"),
    ]  # fmt: skip
    assert all(row["answered"] > 10 for row in found["rows"])
    code, out, err = run(*common)
    assert code == 0 and "a small replica" in err and out.count("\n") == 5, err
    planned = ("lab", "fleet", "-m", str(MACHINES / "llama-3.1-8b.json"), "--machine", str(MACHINES / "h100-sxm.json"))
    code, out, err = run(*planned, "-x", "h2o", "--seconds", "30", "--warmup", "5", "--json")
    assert code == 0 and json.loads(out)["pace"]["longest"] == 131072, err
    for wrong, sentence in (
        (("--route", "hsh"), "did you mean hash"),
        (("--replicas", "0"), "whole numbers"),
        (("--pace", str(tmp_path)), "cannot be read"),
        (("--warmup", "700"), "warm-up"),
        (("--first", "20000"), "exceeds the longest session, 9,000"),
        (("--rate", "nan"), "finite"),
        (("--seconds", "inf"), "finite"),
        (("--route", "none"), "Unknown route"),
        (("--replicas", "²"), "whole numbers"),
    ):
        code, out, err = run("lab", "fleet", "--pace", str(path), *wrong)
        assert code == 2 and sentence in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ([], "no object"),
        ({"name": 1}, "no object"),
        ({"hot": 1}, "has hot, and known are name"),
        ({"step": [[1, 0]]}, "'step' are too small"),
        ({"step": [[2, 1], [1, 2]]}, "'step' rise"),
        ({"prompt": [[1, math.inf]]}, "'prompt' is a list of one point or more"),
        ({"past": []}, "'past' is a list of one point or more"),
        ({"stored": [1, 2]}, "'stored' is a list of points"),
        ({"held": [[0, 1e6]]}, "more is held than granted at 0 tokens"),
        ({"held": [[0, 0], [1000, 1e3]], "granted": [[0, 0], [500, 10], [1000, 1e3]]}, "than granted at 500 tokens"),
        ({"held": [[0, 0], [1000, 1e3]], "granted": [[0, 1e3], [1000, 1e3]]}, "than granted at 9000 tokens"),
        ({"memory": math.nan}, "'memory' is a number above 0"),
        ({"chunk": 0.5}, "'chunk' is a whole number above 0"),
    ],
)
def test_an_invalid_pace_file_is_refused(wrong: Any, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "pace.json"
    path.write_text(json.dumps(BUSY.as_dict() | wrong if wrong else wrong))
    with pytest.raises(UsageError, match=sentence):
        ReplicaPace.load(path)
    path.write_text("{1")
    with pytest.raises(UsageError, match="not a JSON file"):
        ReplicaPace.load(path)
    path.write_text(json.dumps({"name": "x", "step": [[1, 1]]}))
    with pytest.raises(UsageError, match="has no past, prompt, held, granted, stored, memory"):
        ReplicaPace.load(path)


def test_a_method_that_drafts_has_no_pace() -> None:
    with pytest.raises(UsageError, match="drafts"):
        ReplicaPace.planned(None, None, 0, "snapkv+verified", 512)  # type: ignore[arg-type]


ACCEPTED = [name for name in CACHES if not Candidate.parse(name).method.recall.drafts]


@pytest.mark.parametrize("link", [64e9, None], ids=["link", "shared"])
@pytest.mark.parametrize("name", [*ACCEPTED, "quest", "kv-direct kv@disk"])
def test_a_planned_pace_equals_the_planner_at_any_length(name: str, link: float | None) -> None:
    """Also between the points of the pace: seconds and bytes of an 8B model on an H100, within a tenth."""
    machine, candidate = replace(Machine.load(MACHINES / "h100-sxm.json"), link=link), Candidate.parse(name)
    shape = shape_of(AutoConfig.from_pretrained(MACHINES / "llama-3.1-8b.json"), 2)
    pace = ReplicaPace.planned(shape, machine, 10**11, name, 4096)
    for tokens in (3_000, 9_000, 45_000, 120_000):
        budget_of = None if candidate.keeps_all else 4096
        planned = sizes(shape.geometry, candidate, tokens, budget_of, shared=machine.shared)
        one, many = (cost(shape, candidate, planned, machine, ACCEPTANCE, count) for count in (1, 24))
        near = partial(pytest.approx, rel=0.1)
        assert pace.step(1) + pace.past(tokens) == near(one.step) and pace.past(tokens) == near(one.step - one.fixed)
        assert pace.step(24) + 24 * pace.past(tokens) == near(many.step) and pace.prompt(tokens) == near(one.prefill)
        resting = planned.resident + planned.compressed
        assert pace.held(tokens) == near(resting + planned.device + (planned.host if machine.shared else 0))
        assert pace.stored(tokens) == near(resting + planned.checkpoints)
        assert pace.granted(tokens) == near(grant(shape.geometry, candidate, budget_of, tokens, shared=machine.shared))


def test_bursts_of_two_replicas_take_as_long_as_the_fuller_one() -> None:
    """Eight sessions of one turn arrive at once, and the next eight when all are done."""
    given = Scenario(2, burst=8, turns=1, first=1, answer=101, fixed=True, seconds=1000, warmup=0, disk=1e18, link=1e18)
    hashed, even = (simulate(SHARED, replace(given, route=route)) for route in ("hash", "least"))
    assert even.answered == pytest.approx(1000 / (4 * 101 * STEP) * 8, abs=8)
    ring = Simulation(SHARED, given).ring
    there = [ring.pick(SimulatedSession(number).hash) for number in range(1, hashed.answered + 1)]
    fuller = [max(Counter(there[at : at + 8]).values()) for at in range(0, len(there), 8)]
    assert sum(fuller) * 101 * STEP == pytest.approx(1000, rel=0.01) and max(fuller) > 5


def test_a_burst_starts_when_the_previous_one_has_ended() -> None:
    pace, alive = replace(BUSY, longest=5000), list[int]()

    class Watched(Simulation):
        def _burst(self, about: None) -> None:
            assert not self.load and not self.alive
            super()._burst(about)

        def _area(self) -> None:
            super()._area()
            alive.append(self.alive)

    given = Scenario(2, burst=8, turns=3, think=0.1, first=4000, seconds=300, warmup=100)
    found = Watched(pace, given).run()
    assert max(alive) == 8 and min(found.refused, found.answered) > 50
    assert found.before + found.asked == found.answered + found.refused + found.left and found.before
    for wrong, sentence in ((4900, "exceeds the longest session, 5,000"), (10**6, "exceeds the longest")):
        with pytest.raises(UsageError, match=sentence):
            Simulation(pace, replace(given, first=wrong))
    with pytest.raises(UsageError, match="exceeds a replica's memory"):
        Simulation(replace(pace, memory=4800.0), given)


def test_the_load_bound_counts_the_replicas_known_to_be_alive() -> None:
    """Also after the warm-up, and if a replica restarts before its failure is noticed."""
    one = Simulation(BUSY, replace(HARD, route="bounded", restart=10.0, mtbf=15.0))
    pick, counts = one.ring.pick, Counter[int]()

    def watched(place: int, bound: float) -> SimulatedReplica | None:
        there = sum(replica.seen for replica in one.replicas)
        assert bound == math.ceil(BOUND * one.load / max(1, there)) and there == one.there
        counts[there] += one.now > HARD.warmup
        return pick(place, bound)

    one.ring.pick = watched  # type: ignore[assignment, method-assign]
    one.run()
    assert len(counts) > 3 and min(counts.values()) > 3
    back = Simulation(BUSY, replace(HARD, route="bounded", restart=0.1, notice=3.0))
    back.run()
    assert back.failures > 5 and back.there == 4


def test_every_route_sends_to_a_replica_that_is_down_until_it_is_noticed() -> None:
    for route in ("hash", "bounded", "least"):
        given = replace(HARD, route=route, mtbf=None, rate=1e-9, notice=5.0)  # type: ignore[arg-type]
        one, sessions = Simulation(BUSY, given), [SimulatedSession(number) for number in range(200)]
        for replica in one.replicas:
            one._count(replica, 1)
        one.load = len(one.replicas)
        one.fail(down := one.replicas[2])
        assert down in [one._route(session) for session in sessions] and not down.load, route
        one.now = 5.0
        one._notice((down, down.life))
        assert down not in [one._route(session) for session in sessions], route
        one._restart(down)
        assert down in [one._route(session) for session in sessions], route


def test_the_queue_of_least_loaded_replicas_stays_small() -> None:
    """The chosen replica always has the fewest answers of those that the router knows."""
    one = Simulation(BUSY, replace(HARD, route="least"))
    route, sizes = one._route, list[int]()

    def watched(session: SimulatedSession) -> SimulatedReplica | None:
        picked = route(session)
        loads = [replica.load for replica in one.replicas if replica.seen]
        assert (picked.load if picked else None) == min(loads, default=None) and (picked is None or picked.seen)
        sizes.append(len(one._least))
        return picked

    one._route = watched  # type: ignore[method-assign]
    found = one.run()
    assert found.failures > 5 and len(sizes) > 500 and max(sizes) <= 8 * len(one.replicas)


def test_failures_of_the_warm_up_are_not_counted() -> None:
    """Whether the client recovers after the warm-up or never."""
    for restart, sooner in ((2.0, True), (1e3, False)):
        given = Scenario(1, 1e-9, first=100, think=1e6, restart=restart, seconds=20, warmup=10, notice=0.5)
        for at in (9.5, 10.5):
            one = Simulation(replace(BUSY, step=PiecewiseLine(((1, 0.1),))), given)
            one._ask(SimulatedSession(1))
            one._at(at, one.fail, one.replicas[0])
            found = one.run()
            assert (found.recovered is None) == (at < 10)
            assert at > 10 or (found.failures == 0 and bool(one.retrying) != sooner)
