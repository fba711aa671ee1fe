"""A machine's rates: estimated from its processor, measured once, and kept."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep.errors import KvkeepError
from kvkeep.native.library import TORCH, path
from kvkeep.plan import calibrate, estimate, rates
from kvkeep.plan.estimate import CORES, estimated
from kvkeep.plan.machine import Machine
from kvkeep.plan.rates import BusyError, failure_file, machine_here, only_one, rates_file


def test_estimates_say_so_and_follow_the_instruction_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {}
    assert path() in CORES
    for name in CORES:
        monkeypatch.setattr(estimate, "path", lambda name=name: name)
        found[name] = estimated("cpu", torch.float32)
        assert found[name].estimated and "kvkeep calibrate --dtype float32" in found[name].source
    assert found["avx512"].multiply(256, 512, 1e6) < found["avx2"].multiply(256, 512, 1e6)
    assert found["avx2"].multiply(256, 512, 1e6) < found["plain"].multiply(256, 512, 1e6)
    without = found[TORCH], estimated()  # in half precision torch is slow
    assert without[0].multiply(256, 512, 1e6) < 0.2 * without[1].multiply(256, 512, 1e6)
    assert estimated().source == "estimated; run `kvkeep calibrate` to measure"
    found["plain"].save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == found["plain"]


def test_rates_are_estimates_until_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the place is written, and with the native library and without apart."""
    machine = replace(estimated(), source="measured", name="this one")
    made = []
    monkeypatch.setattr(calibrate, "calibrate", lambda *given: made.append(given[:2]) or machine)
    assert machine_here("cpu").estimated and made == []
    failure_file("cpu", torch.bfloat16).parent.mkdir(parents=True)
    failure_file("cpu", torch.bfloat16).write_text("no luck\n")
    path = calibrate.measure_here("cpu", torch.bfloat16)
    assert machine_here("cpu") == machine_here("cpu:0", torch.bfloat16) == machine
    assert not failure_file("cpu", torch.bfloat16).exists()  # it can be measured after all
    assert machine_here("cpu", torch.float32).estimated and len(made) == 1
    monkeypatch.setattr(rates, "native_path", lambda: "some path")
    assert machine_here("cpu").estimated
    monkeypatch.undo()
    path.write_text("cut sho")
    assert machine_here("cpu").estimated


def test_one_process_measures_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with only_one(tmp_path / "rates"), pytest.raises(BusyError, match="Another process"), only_one(tmp_path / "rates"):
        pass
    with only_one(tmp_path / "rates"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(KvkeepError, match="cannot be kept"), only_one(tmp_path / "file"):
        pass


def test_a_measurement_in_the_background_ends_with_the_process_that_began_it() -> None:
    command = [sys.executable, "-m", "kvkeep.plan.background", "cpu", "bfloat16", "1"]
    ended: Any = subprocess.run(command, input=b"", capture_output=True, timeout=120)
    assert ended.returncode == 1 and ended.stderr == b"" and not rates_file("cpu", torch.bfloat16).exists()
