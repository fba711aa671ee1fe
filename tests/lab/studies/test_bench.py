"""The bench measures what it says, and keeps what it has."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from families import tiny
from kvkeep_lab import timing
from kvkeep_lab.partial import INTERRUPTED, Interruption
from kvkeep_lab.studies.bench import cases
from kvkeep_lab.timing import Case, run


def test_every_case_is_measured_against_stock() -> None:
    listed = cases(tiny("llama"), [40], "16", steps=3)
    rows = {row.label: row for row in run(tiny("llama"), listed, rounds=1, steps=3)}
    assert len(rows) == len(listed)
    assert {"stock", "naive", "full", "static", "paged", "kv-direct tokens@device"} <= set(rows)
    groups = {"quantized:8", "quantized:4", "quantized:2", "lowrank:32", "h2o+quantize:4", "revive"}
    small = {name for name, row in rows.items() if row.error}  # the budget has no room for groups of 32, or sinks
    assert small <= {*groups, "kvslimmer", "asymkv", "kvslimmer-exact"} and rows["stock"].step_ratio == 1.0
    for row in rows.values():
        if row.error:
            assert "no room" in row.error or "too few to merge" in row.error
            continue
        assert row.held_ratio is not None and row.held_ratio > 0
        assert row.steps == (3 if row.label == "naive" else 2)
        assert row.step_ms is not None and row.step_ratio is not None and row.step_ratio > 0
    held = {label: row.memory["resident_bytes"] for label, row in rows.items()}
    assert held["kv-direct kv@disk"] < held["stock"] <= held["kv-direct, no recall"]
    assert rows["kv-direct residual@disk"].memory["checkpoint_bytes"]["disk"] > 0


def test_an_interrupt_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = timing._measure, []

    def third_time_interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return honest(*arguments)

    monkeypatch.setattr(timing, "_measure", third_time_interrupted)
    with pytest.raises(Interruption) as stop:
        run(tiny("llama"), cases(tiny("llama"), [30], "16", steps=2)[:5], rounds=3, steps=2)
    rows = stop.value.found
    assert [row.error for row in rows] == ["", "", *[INTERRUPTED] * 3]
    assert rows[0].step_ms is not None


def test_patience_ends_slow_cases() -> None:
    row = run(tiny("llama"), [Case("stock", 30, "stock")], rounds=3, steps=9, patience_s=0.0)[0]
    assert row.steps == 1


def test_the_clock_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by 3 seconds whenever it is looked at: every pass takes as long."""
    ticks = count(0, 3)
    monkeypatch.setitem(timing.CLOCKS, "processor", lambda: float(next(ticks)))
    row = run(tiny("llama"), [Case("stock", 30, "stock")], rounds=2, steps=3, clock="processor")[0]
    assert (row.prefill_s, row.step_ms, row.slowest_ms, row.steps) == (3.0, 3000.0, 3000.0, 4)


def test_merging_is_told_apart() -> None:
    """Its seconds are part of the steps'; others have none."""
    options = {"budget": "16", "chunk": 8}
    listed = [Case(name, 30, name, options) for name in ("h2o", "h2o+merge", "cam", "kvslimmer:sinks=1,slack=2")]
    plain, *merging = run(tiny("llama"), [*listed, Case("stock", 30, "stock")], rounds=2, steps=8)[:4]
    assert plain.merging_ms == 0
    for row in merging:
        assert row.mean_ms is not None and row.merging_ms is not None
        assert 0 < row.merging_ms < row.mean_ms
