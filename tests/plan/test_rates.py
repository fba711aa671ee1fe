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
from kvkeep.plan import calibrate, estimate, rates
from kvkeep.plan.estimate import CORES, estimated, processor
from kvkeep.plan.machine import Machine
from kvkeep.plan.rates import BusyError, failure_file, machine_here, only_one, rates_file

FLAGS = {
    "avx512": "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx_vnni",
    "avxvnni": "avx2 fma f16c avx_vnni",
    "avx2": "avx2 fma f16c avx512f",
    "plain": "sse4_2 avx",
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_processor_is_told_by_its_flags(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVKEEP_CPU", raising=False)
    monkeypatch.setattr(estimate.platform, "machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text(f"model name\t: some\nflags\t\t: fpu {FLAGS[name]} sse\n\n")
    assert processor(tmp_path / "cpuinfo") == name
    assert processor(tmp_path / "nothing") == "plain"
    monkeypatch.setattr(estimate.platform, "machine", lambda: "arm64")
    assert processor(tmp_path / "nothing") == "neon"
    monkeypatch.setenv("KVKEEP_CPU", "avx2")
    assert processor(tmp_path / "cpuinfo") == "avx2"


def test_estimates_say_so_and_follow_the_instruction_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {}
    monkeypatch.setattr(estimate, "library", lambda: None)
    for name in CORES:
        monkeypatch.setenv("KVKEEP_CPU", name)
        found[name] = estimated("cpu", torch.float32)
        assert found[name].estimated and "kvkeep calibrate --dtype float32" in found[name].source
    assert found["avx512"].multiply(256, 512, 1e6) < found["avx2"].multiply(256, 512, 1e6)
    assert found["avx2"].multiply(256, 512, 1e6) < found["plain"].multiply(256, 512, 1e6)
    monkeypatch.delenv("KVKEEP_CPU")
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
