"""Files of any time are listed, used and removed, and nothing crashes."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from storing import TURNS, check_whole, store_text
from typer.testing import CliRunner

from kvkeep.blocks.store import DAY_S, Store
from kvkeep.cli.cache import app

pytestmark = pytest.mark.usefixtures("kernels")
NAME = "me/talk"
TIMES = (-(2**31), -1, 0, 2**31, 2**32 + 10, 2**33, 9_223_372_037, 13_000_000_000, 2**40, 2**62)
"""Seconds since 1970: also beyond 2038, 2262 and 2446."""


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
