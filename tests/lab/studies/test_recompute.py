"""Recompute or read: the ways give the same entries, the accounts add up, and cold means cold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import tiny
from kvkeep_lab import recall_timing as lab
from kvkeep_lab.buffers import Roofline, Storage, faults
from kvkeep_lab.recall_timing import APART, ATTEND, READ, RECOMPUTE, run

from kvkeep import StoreError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are not looked at here, so nothing has to be really cold."""
    monkeypatch.setattr("kvkeep_lab.buffers.SWEEP_BYTES", 1 << 12)
    monkeypatch.setattr("kvkeep_lab.buffers.COPY_BYTES", 1 << 16)


def test_every_way_at_every_count(tmp_path: Path) -> None:
    steps: list[int] = []
    report = run(
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
def test_the_ways_give_the_same_entries(family: str) -> None:
    """What is read, whole or entry by entry, is what is recomputed."""
    bench = lab._Bench(tiny(family), [17], None)
    layer = bench.geometry.layers[bench.layers[0]]
    for place in bench.storages:
        held = bench._held[place, 17]
        for warm in (True, False):
            ways = dict(bench._ways(layer, held, warm))
            expected = ways[RECOMPUTE]()
            for way in (READ, APART):
                if way in ways:
                    for mine, theirs in zip(ways[way](), expected, strict=True):  # type: ignore[call-overload]
                        assert torch.equal(mine, theirs)
    bench.close()


def test_files_on_disk_leave_memory_and_come_back(tmp_path: Path) -> None:
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


def test_the_roofline_is_arithmetic() -> None:
    roof = Roofline(1e9, {"device": 1e8})
    assert roof.read_s("device", 10, 384, 4) == pytest.approx(10 * 384 * 4 / 1e8)
    extra = roof.recompute_s("device", 10, 576, 384, 4) - 10 * 576 * 4 / 1e8
    assert extra == pytest.approx(2 * 10 * 576 * 384 / 1e9)
    even = Roofline(1e9, {"slow": roof.break_even(576, 4)})
    fetched = 10 * 576 * 4 / even.bandwidth["slow"]
    assert even.read_s("slow", 10, 384, 4) == pytest.approx(even.recompute_s("slow", 10, 576, 384, 4) - fetched)
