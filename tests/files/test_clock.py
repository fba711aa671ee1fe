"""A clock that is set is noticed; one that runs, or is corrected by a little, is not."""

from __future__ import annotations

import math
import time

import pytest

from kvkeep.files.clock import ClockWatch


@pytest.mark.parametrize("by", [-(10**9), -3600, 3600, 10**9])
def test_a_clock_that_is_set_is_steady_from_then_on(by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, now, began = ClockWatch(), time.time, time.monotonic()
    assert watch.steady_s() == math.inf
    monkeypatch.setattr(time, "time", lambda: now() + 5)
    assert watch.steady_s() == math.inf
    monkeypatch.setattr(time, "time", lambda: now() + by)
    assert watch.steady_s() <= time.monotonic() - began
    time.sleep(0.01)
    assert 0.01 <= watch.steady_s() <= time.monotonic() - began
