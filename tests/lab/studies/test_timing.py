"""The bench and the ways of recall: what is timed, cold buffers, and finished rows."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from kvkeep_lab import recall_timing, timing
from kvkeep_lab.buffers import Roofline, Storage, faults
from kvkeep_lab.partial import INTERRUPTED, Interruption
from kvkeep_lab.recall_timing import APART, ATTEND, READ, RECOMPUTE
from kvkeep_lab.studies.bench import cases
from kvkeep_lab.timing import TimingCase, run

from kvkeep import StoreError


def test_every_case_of_the_bench_is_timed_against_stock() -> None:
    listed = cases(tiny("llama"), [40], "16", steps=3)
    rows = {row.label: row for row in run(tiny("llama"), listed, rounds=1, steps=3)}
    assert len(rows) == len(listed)
    assert {"stock", "naive", "full", "static", "paged", "kv-direct tokens@device"} <= set(rows)
    groups = {"quantized:8", "quantized:4", "quantized:2", "lowrank", "h2o+quantize:4", "revive"}
    small = {name for name, row in rows.items() if row.error}  # the budget has no room for groups of 32, or sinks
    assert small <= {*groups, "kvslimmer", "asymkv", "kvslimmer-exact", "kvslimmer-published"}
    assert rows["stock"].step_ratio == 1.0
    for row in rows.values():
        if row.error:
            assert "too small" in row.error or "too few to merge" in row.error
            continue
        assert row.held_ratio is not None and row.held_ratio > 0
        assert row.steps == (3 if row.label == "naive" else 2)
        assert row.step_ms is not None and row.step_ratio is not None and row.step_ratio > 0
    operands = {label: row.memory["resident_bytes"] for label, row in rows.items()}
    assert operands["kv-direct kv@disk"] < operands["stock"] <= operands["kv-direct, no recall"]
    assert rows["kv-direct residual@disk"].memory["checkpoint_bytes"]["disk"] > 0


def test_an_interrupt_keeps_the_finished_rows(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_slow_case_ends_when_its_patience_runs_out() -> None:
    row = run(tiny("llama"), [TimingCase("stock", 30, "stock")], rounds=3, steps=9, patience_s=0.0)[0]
    assert row.steps == 1


def test_the_clock_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up clock advances 3 seconds per call, so every pass takes as long."""
    ticks = count(0, 3)
    monkeypatch.setitem(timing.CLOCKS, "processor", lambda: float(next(ticks)))
    row = run(tiny("llama"), [TimingCase("stock", 30, "stock")], rounds=2, steps=3, clock="processor")[0]
    assert (row.prefill_s, row.step_ms, row.slowest_ms, row.steps) == (3.0, 3000.0, 3000.0, 4)


def test_the_time_of_merging_is_reported_separately() -> None:
    """It is part of the time of a step."""
    options = {"budget": "16", "chunk": 8}
    listed = [TimingCase(name, 30, name, options) for name in ("h2o", "h2o+merge", "cam", "kvslimmer:sinks=1,slack=2")]
    plain, *merging = run(tiny("llama"), [*listed, TimingCase("stock", 30, "stock")], rounds=2, steps=8)[:4]
    assert plain.merging_ms == 0
    for row in merging:
        assert row.mean_ms is not None and row.merging_ms is not None
        assert 0 < row.merging_ms < row.mean_ms


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are not looked at here, so nothing has to be really cold."""
    monkeypatch.setattr("kvkeep_lab.buffers.SWEEP_BYTES", 1 << 12)
    monkeypatch.setattr("kvkeep_lab.buffers.COPY_BYTES", 1 << 16)


def test_recall_is_timed_in_every_way_at_every_count(tmp_path: Path) -> None:
    steps: list[int] = []
    report = recall_timing.run(
        tiny("llama"), "tiny", counts=(1, 20), rounds=2, slow=True, folder=None,
        progress=lambda text, done, total: steps.append(done),
    )  # fmt: skip
    assert (report.hidden, report.width, report.itemsize, report.layers) == (32, 32, 4, [0, 2, 3])
    assert not report.interrupted and steps == [0, 1, 2, 3]
    for place in ("device", "disk"):
        for buffers in ("warm", "cold"):
            ways = {row.way for row in report.rows if (row.place, row.buffers, row.n) == (place, buffers, 20)}
            assert ways >= {RECOMPUTE, READ, ATTEND} and (APART in ways) == (place == "device")
    assert {row.way for row in report.rows} >= {"tokens", "residual:4"}
    for row in report.rows:
        assert 0 < row.ms <= row.median_ms and row.page_faults >= 0
        assert (row.roofline_ms is not None) == (row.way in (RECOMPUTE, READ))
        assert row.way != RECOMPUTE or row.recompute_ratio == 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@torch.inference_mode()
def test_all_ways_of_recall_give_the_same_entries(family: str) -> None:
    bench = recall_timing._Bench(tiny(family), [17], None)
    layer = bench.geometry.layers[bench.layers[0]]
    for place in bench.storages:
        operands = bench._operands[place, 17]
        for warm in (True, False):
            ways = dict(bench._ways(layer, operands, warm))
            expected = ways[RECOMPUTE]()
            for way in (READ, APART):
                if way in ways:
                    for mine, theirs in zip(ways[way](), expected, strict=True):  # type: ignore[call-overload]
                        assert torch.equal(mine, theirs)
    bench.close()


def test_files_of_the_storage_are_dropped_from_memory_and_read_again(tmp_path: Path) -> None:
    storage = Storage("disk", CPU, tmp_path)
    tensor = torch.randn(3, 4096)
    kept = storage.put(tensor)
    before = faults()
    storage.drop_pages()
    assert torch.equal(kept, tensor) and faults() >= before
    assert not list(tmp_path.iterdir())  # files have no names
    storage.clear()
    with pytest.raises(StoreError):
        Storage("disk", CPU, tmp_path / "missing")


def test_the_roofline_follows_from_bandwidth_and_compute() -> None:
    roof = Roofline(1e9, {"device": 1e8})
    assert roof.read_s("device", 10, 384, 4) == pytest.approx(10 * 384 * 4 / 1e8)
    extra = roof.recompute_s("device", 10, 576, 384, 4) - 10 * 576 * 4 / 1e8
    assert extra == pytest.approx(2 * 10 * 576 * 384 / 1e9)
    even = Roofline(1e9, {"slow": roof.break_even(576, 4)})
    fetched = 10 * 576 * 4 / even.bandwidth["slow"]
    assert even.read_s("slow", 10, 384, 4) == pytest.approx(even.recompute_s("slow", 10, 576, 384, 4) - fetched)
