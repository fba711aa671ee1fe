"""Clocks that are set, and files of any time: nothing is removed that somebody uses, and nothing crashes."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from storing import TURNS, check_whole, store_text
from typer.testing import CliRunner

from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.names import session_key
from kvkeep.blocks.store import DAY_S, Store
from kvkeep.cli.cache import app

pytestmark = pytest.mark.usefixtures("kernels")
NAME = "me/talk"
YEAR_S = 365 * 86400
TIMES = (-(2**31), -1, 0, 2**31, 2**32 + 10, 2**33, 9_223_372_037, 13_000_000_000, 2**40, 2**62)
"""Seconds since 1970: also beyond 2038, 2262 and 2446."""


def set_clock(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + by)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(by * 1e9))


@pytest.mark.parametrize("years", [-60, -5, 5, 300])
def test_nothing_in_use_goes_when_the_clock_is_set(years: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that runs has no other way to know what is old."""
    store = Store(tmp_path, quota=10**7, age=86400.0)
    store_text(store, NAME, "h2o")
    left = BlockName("me", session_key())
    store.blocks.write(left, {})  # a program is saving
    assert store.evict() == 0
    set_clock(monkeypatch, years * YEAR_S)
    for _ in range(3):
        assert store.evict() == 0
    assert store.blocks.has(left) and check_whole(store, NAME, "h2o") == TURNS[1]
    store_text(store, NAME, "h2o")
    assert store.evict() == 0 and check_whole(store, NAME, "h2o") == TURNS[1]


def test_ages_count_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, age=0.2)
    store_text(store, NAME, "h2o")
    set_clock(monkeypatch, 5 * YEAR_S)
    assert store.evict() == 0
    time.sleep(0.3)
    assert store.evict() == 1


@pytest.mark.turns(3)
@pytest.mark.parametrize("when", TIMES)
def test_files_of_any_time_are_listed_and_evicted(when: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, quota=10**7)
    store_text(store, NAME, "h2o")
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in paths:
        with suppress(OSError, OverflowError):  # a file system takes the nearest time that it has
            os.utime(path, (when, when))
    for given in (["list"], ["list", "--json"], ["show", NAME], ["show", NAME, "--json"], ["check"]):
        found = CliRunner().invoke(app, [*given, "--sessions", str(tmp_path)])
        assert found.exit_code == 0, found.output
    for age in (1e-9, 1e6, 1e300):
        Store(tmp_path, age=age * DAY_S).evict()
    assert [info.name for info in Store(tmp_path).sessions()] == ([NAME] if when > time.time() else [])
    store_text(store, NAME, "h2o")
    assert check_whole(store, NAME, "h2o") == TURNS[1]
