"""What is worth the most stays, in memory and on disk: no side request evicts a conversation that goes on."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from answering import Client, run, small, text

from kvkeep import KeepCache
from kvkeep.blocks.folder import BlockFolder
from kvkeep.blocks.store import Store
from kvkeep.blocks.value import HALF_LIFE_S, part_left, seconds_left
from kvkeep.decode.cached_text import CachedText, common_prefix
from kvkeep.serve.engine import Engine
from kvkeep.serve.eviction import by_value
from kvkeep.serve.session import OpenSession, peak_bytes

FULL: dict[str, Any] = {"method": "full"}
START = text(1200, 0)
SIDES = [text(300, number) for number in range(100, 120)]
"""Other instructions, each used once."""


def cached(engine: Engine, ids: list[int]) -> int:
    client = Client(engine, ids, 1, owner="me")
    run(engine)
    return client.ended.cached


def turn(number: int) -> list[int]:
    return [*START, *text(20, 1 + number)]


def test_twenty_side_requests_leave_the_main_conversation_in_memory() -> None:
    engine = Engine(small(positions=2048), 10**9, **FULL)
    engine.arbiter.total = int(1.5 * peak_bytes(KeepCache(engine.model, **FULL), len(turn(0)) + 1))
    assert [cached(engine, turn(number)) for number in range(2)] == [0, len(START)]
    assert [cached(engine, side) for side in SIDES] == [0] * len(SIDES)
    assert cached(engine, turn(2)) == len(START)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_nor_on_disk_which_a_restart_shows(family: str, tmp_path: Path) -> None:
    whole = len(START) // 256 * 256

    def serving(quota: int | None) -> Engine:
        return Engine(small(family, 2048), 10**9, store=Store(tmp_path, quota=quota), **FULL)

    engine = serving(None)
    cached(engine, turn(0))
    engine.close()
    quota = int(1.5 * Store(tmp_path).blocks.count()[1])
    for number, side in enumerate(SIDES):
        engine = serving(quota)
        if not number:
            assert cached(engine, turn(1)) >= whole
        assert cached(engine, side) == 0
        engine.close()
        assert Store(tmp_path).blocks.count()[1] <= quota
    engine = serving(quota)
    assert cached(engine, turn(2)) >= whole
    assert cached(engine, SIDES[-1]) > 0  # what is new is stored all the same
    engine.close()


def test_a_conversation_that_ended_leaves_in_time() -> None:
    long, short = seconds_left(20_000), seconds_left(500)
    for _ in range(99):
        long = seconds_left(20_000, long)
    assert long > short + 10 * HALF_LIFE_S  # now, and any time later
    assert long - 13 * HALF_LIFE_S < short  # beside one that begins then
    dice = random.Random(0)
    for _ in range(100):
        saved, left, later = dice.uniform(1, 1e5), dice.uniform(-1e5, 4e5), dice.uniform(0, 1e5)
        used = seconds_left(saved, left)
        assert used > left and used >= seconds_left(saved)  # a use adds to the value
        assert seconds_left(saved, left - later) <= used  # and less if the others are long ago
        assert part_left(used, 0.5) == pytest.approx(used - HALF_LIFE_S)
    assert seconds_left(1, 1e12) < 1e6  # a clock that was set back


def session(ids: list[int], uses: int = 1, owner: str = "me") -> OpenSession:
    model = small().model
    made = OpenSession(None, CachedText(KeepCache(model, "full"), ids), owner)
    for _ in range(uses):
        made.count_use()
    return made


def test_a_leaf_leaves_before_its_trunk_and_what_is_shared_counts_once() -> None:
    trunk, other = text(500, 0), text(400, 1)
    leaves = [session([*trunk, *text(20, 10 + number)], 3) for number in range(4)]
    beside = session(other, 2)
    order = by_value([*leaves, beside])
    assert {*order[:3]} < {*leaves} and order[3] is beside  # three of four leaves are worth 20 tokens each
    stranger = session(leaves[0].past.ids, 3, owner="you")
    assert by_value([stranger, leaves[0], beside])[0] is beside  # another owner's is not shared


def test_the_order_is_that_of_the_least_loss_at_each_step() -> None:
    dice = random.Random(1)
    for turns in range(20):
        stems = [text(60, number) for number in range(3)]
        given = [
            session([*dice.choice(stems)[: dice.randint(1, 60)], *text(dice.randint(1, 40), dice.randrange(9))], uses)
            for uses in (dice.randint(1, 4) for _ in range(dice.randint(1, 8)))
        ]
        order, left = by_value(given), [*given]

        def lost(one: OpenSession, left: list[OpenSession]) -> float:
            ids = one.past.ids
            known = max((common_prefix(ids, other.past.ids) for other in left if other is not one), default=0)
            return part_left(one.worth, max(1, len(ids) - known) / len(ids))

        for one in order:
            assert lost(one, left) == pytest.approx(min(lost(other, left) for other in left)), turns
            left.remove(one)
        assert not left


def test_a_use_on_disk_costs_no_write_of_a_file(tmp_path: Path) -> None:
    engine = Engine(small(positions=2048), 10**9, store=Store(tmp_path), **FULL)
    cached(engine, turn(0))
    engine.close()
    before = {path: path.stat() for path in tmp_path.rglob("*.block")}
    folder = BlockFolder(tmp_path / "blocks")
    names = folder.names()
    folder.use(names)
    for path, facts in before.items():
        now = path.stat()
        assert (now.st_ino, now.st_size) == (facts.st_ino, facts.st_size)
        assert now.st_atime > max(facts.st_atime, time.time() + HALF_LIFE_S)  # what the system leaves as it is
        path.read_bytes()
        assert path.stat().st_atime == now.st_atime
