"""``kvkeep recompute`` as a person and a program meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvkeep_lab import recompute as lab

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def common(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setattr("kvkeep_lab.buffers.SWEEP_BYTES", 1 << 12)
    monkeypatch.setattr("kvkeep_lab.roofline._BYTES", 1 << 16)
    return ("recompute", "-m", str(model_folder), "--counts", "1,9", "--rounds", "1")


def test_json_is_one_object(run: Run, common: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    code, out, err = run(*common, "--beside", "qwen2.5-0.5b", "-o", str(picture), "--json")
    assert code == 0, err
    report = json.loads(out)
    assert set(report) == {"machine", "models", "figure"} and len(report["models"]) == 2
    for model in report["models"]:
        assert set(model) == {
            "model", "hidden", "width", "itemsize", "layers", "roofline", "break_even_bytes_per_s", "rows",
            "interrupted",
        }  # fmt: skip
        assert {row["n"] for row in model["rows"]} == {1, 9}
    assert report["figure"] == str(picture) and picture.stat().st_size > 10_000


def test_table_and_refusals(run: Run, common: tuple[str, ...]) -> None:
    code, out, err = run(*common, "--beside", "none")
    assert code == 0 and "recompute" in out and "from device, cold buffers" in out and "GFLOP/s" in out, err
    for wrong in (("--counts", "0"), ("--counts", "a"), ("--beside", "nonsense"), ("-o", "picture.txt")):
        code, out, err = run(*common, *wrong)
        assert code == 2 and not out and err.count("\n") == 1, wrong


def test_an_interrupt_leaves_what_was_measured(
    run: Run, common: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, count: int, turn: int) -> Any:
        if count == 9:
            raise KeyboardInterrupt
        yield from whole(self, count, turn)

    whole = lab._Bench.samples
    monkeypatch.setattr(lab._Bench, "samples", interrupted)
    code, out, err = run(*common, "--json")
    assert code == 1 and "Interrupted" in err
    assert [{row["n"] for row in model["rows"]} for model in json.loads(out)["models"]] == [{1}]
