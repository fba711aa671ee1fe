"""Scripts of tools/ that measure a server's store: each runs once with a tiny model, and prints its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from answering import small
from kvkeep_lab.peers.servers import Running
from living import until
from measuring import tool
from running import serving

import kvkeep
from kvkeep.blocks.store import Store
from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine

IDS = range(5, 60)


class ServerHere:
    """A server in this process. What is killed is a process beside it, once all text has been stored."""

    model = "tiny"

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded

    @contextmanager
    def running(self) -> Iterator[Running]:
        engine = Engine(self.loaded, 10**9, store=Store(os.environ["KVKEEP_DATA"]), method="full")
        beside = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
        with serving([], engine=engine) as (url, _):
            yield Running(beside.pid, f"{url}/v1")
            until(lambda: not (engine.sessions.storing or engine.sessions.storage.busy))
        assert beside.wait(60) < 0


@pytest.mark.parametrize("argument", ["tiny", "none"])
def test_restart_measures_questions_before_and_after(
    argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, records = tool("restart"), tmp_path / "records.json"
    failing = SimpleNamespace(running=lambda: 1 / 0)
    monkeypatch.setattr(script, "SERVERS", {"tiny": ServerHere, "none": lambda loaded: failing})
    monkeypatch.setattr(script, "TOKENS", 600)
    monkeypatch.setattr(script, "IDLE_S", 0.0)
    monkeypatch.setattr(script, "load", lambda name: small(positions=8192))
    monkeypatch.setattr(script.signal, "signal", lambda *given: None)
    monkeypatch.setattr(sys, "argv", ["restart.py", str(records), "1", argument])
    script.main()
    (found,), line = json.loads(records.read_text())[argument], capsys.readouterr().out.splitlines()[-1]
    if argument == "none":
        assert found == {"error": "ZeroDivisionError: division by zero"} and found["error"] in line
        return
    for label in script.QUESTIONS:
        assert found["read"] < found[label]["prompt"] and 256 <= found[label]["cached"] < found[label]["prompt"], label
    assert line.startswith("| tiny, 1 rounds |") and f" {found['after']['prompt']} |" in line


@pytest.mark.parametrize("together", [False, True])
def test_store_pace_measures_engines_with_and_without_a_store(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, records = tool("store_pace"), tmp_path / "records.json"
    for name, value in {"BEGIN": 300, "WRITTEN": 50 if together else 4, "WORDS": IDS}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(kvkeep, "load", lambda name: small(positions=2048))
    given = [str(records), "0", "full", *(["--together"] if together else [])]
    monkeypatch.setattr(sys, "argv", ["store_pace.py", *given])
    script.main()
    (found,) = json.loads(records.read_text()).values()
    assert [len(rounds) for rounds in found.values()] == [1] * 5
    parts: set[Any] = {key for rounds in found.values() for one in rounds for key in one}
    assert parts == ({"turn_s", "stored_s"} if together else {"first_s", "steps_s", "end_s", "stored_s"})
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines[3:]] == [f"| {name.partition(',')[0]}" for name in found]


def test_store_restore_prints_a_line_for_each_method(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tool("store_restore")
    monkeypatch.setattr(script, "METHODS", (("full", None), ("kv-direct", 64)))
    script.main(str(model_folder), "300")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": 300 tokens restored in ")[0] for line in lines] == ["full", "kv-direct"]
