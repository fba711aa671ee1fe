"""Programs of real clients (``tools/client_programs.py``) on a model whose call and answer are known."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from running import figures, serving
from scripted_agent import ANSWER, agent_model

from kvkeep.serve.engine import Engine

FILE = Path(__file__).parents[2] / "tools" / "client_programs.py"


def loaded() -> Any:
    spec = spec_from_file_location("client_programs", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


programs = loaded()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    calls = [(programs.TOOL, {"path": "notes.txt"}), ("bash", {"command": programs.MINI_COMMAND})]
    with serving(keys=[], engine=Engine(agent_model(*calls), 10**8)) as (found, _):
        yield found


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_a_client_calls_sends_the_result_and_gets_the_answer(
    name: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, run = programs.PROGRAMS[name]
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text(ANSWER)
    called, answer = run(address, "any", "tiny")
    assert called in (["notes.txt"], [programs.MINI_COMMAND]) and answer == ANSWER
    refused = [one for one, value in figures(address).items() if "rejected" in one and value]
    assert not refused
