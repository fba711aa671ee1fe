"""A server measures its machine when it has nothing to do, and never twice what cannot be measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from families import tiny
from running import within

from kvkeep.plan.background import BUSY
from kvkeep.plan.estimate import estimated
from kvkeep.plan.rates import failure_file, rates_file, store
from kvkeep.serve import measuring
from kvkeep.serve.measuring import Measuring

SLEEPS = "import time; time.sleep(600)"


class Bench:
    """An engine that does nothing, and processes that do something else than measure."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine: Any = SimpleNamespace(model=tiny("llama"), running=[], waiting=0)
        self.codes: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.told: list[str] = []
        popen = subprocess.Popen

        def started(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            assert command[1:3] == ["-m", "kvkeep.plan.background"]
            self.processes.append(popen([sys.executable, "-c", self.codes.pop(0)], **options))
            return self.processes[-1]

        monkeypatch.setattr(measuring.subprocess, "Popen", started)
        monkeypatch.setattr(measuring, "IDLE_S", 0.0)
        monkeypatch.setattr(measuring, "IDLE_POLL_S", 0.01)
        monkeypatch.setattr(measuring, "_loaded", lambda: False)

    def measuring(self, *codes: str) -> Measuring:
        self.codes = [*codes]
        made = Measuring(self.engine, self.told.append)
        made.start()
        return made


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def ended(one: Measuring) -> Callable[[], bool]:
    return lambda: not one._thread.is_alive()


def test_it_measures_once(bench: Bench) -> None:
    one = bench.measuring("pass")
    assert (
        within(60, ended(one)) and len(bench.told) == 1 and "measurement of this machine is complete" in bench.told[0]
    )
    store(estimated(), rates_file(one.device, one.dtype))
    assert within(60, ended(bench.measuring())) and len(bench.processes) == len(bench.told) == 1


def test_a_failure_is_told_once_and_not_repeated_by_other_processes(bench: Bench) -> None:
    one = bench.measuring("import sys; sys.exit('KvkeepError: no luck')")
    assert within(60, ended(one)) and len(bench.told) == 1 and "(KvkeepError: no luck)" in bench.told[0]
    assert failure_file(one.device, one.dtype).read_text() == "KvkeepError: no luck\n"
    assert within(60, ended(bench.measuring())) and len(bench.processes) == len(bench.told) == 1


def test_a_request_ends_it_and_it_begins_anew(bench: Bench) -> None:
    one = bench.measuring(SLEEPS, "pass")
    assert within(60, lambda: len(bench.processes) == 1)
    bench.engine.waiting = 1
    assert within(60, lambda: bench.processes[0].poll() is not None)
    assert not bench.told and len(bench.processes) == 1
    bench.engine.waiting = 0
    assert within(60, ended(one)) and len(bench.processes) == 2 and len(bench.told) == 1


def test_one_that_another_process_makes_is_awaited(bench: Bench) -> None:
    one = bench.measuring(f"import sys; sys.exit({BUSY})", "pass")
    assert within(60, ended(one)) and len(bench.processes) == 2 and len(bench.told) == 1


def test_a_server_that_ends_abandons_it(bench: Bench) -> None:
    one = bench.measuring(SLEEPS)
    assert within(60, lambda: len(bench.processes) == 1)
    one.stop()
    assert ended(one)() and bench.processes[0].poll() is not None and not bench.told
    assert not failure_file(one.device, one.dtype).exists()
