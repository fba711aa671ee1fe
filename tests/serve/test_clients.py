"""Programs of real clients (``tools/client_programs.py``) on a model whose call and answer are known."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from running import figures, serving
from scripted_agent import ANSWER, agent_model

from kvkeep.serve.engine import Engine
from kvkeep.serve.http.completions import ChatRequest
from kvkeep.serve.http.messages import CountRequest, MessagesRequest
from kvkeep.serve.http.responses import ResponseRequest

REQUESTS: dict[str, Any] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/responses": ResponseRequest,
}
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
    with serving(keys=[], engine=Engine(agent_model(programs.TOOL, "notes.txt"), 10**8)) as (found, _):
        yield found


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", [name for name in programs.PROGRAMS if "mini" not in name])  # it has its own tool
def test_a_client_calls_sends_the_result_and_gets_the_answer(name: str, address: str) -> None:
    package, run = programs.PROGRAMS[name]
    pytest.importorskip(package)
    before = refused(address)
    called, answer = run(address, "any", "tiny")
    assert called == ["notes.txt"] and answer == ANSWER
    assert refused(address) == before


def refused(address: str) -> float:
    """How many requests got an error."""
    return sum(value for name, value in figures(address).items() if name.startswith("kvkeep_requests_rejected_total"))


def test_the_server_knows_every_field_that_clients_send() -> None:
    """The names that ``tools/clients.py --fields`` has recorded. Another field would be a 400, which ends an agent."""
    recorded = json.loads((Path(__file__).parents[1] / "fixtures" / "client_fields.json").read_text())
    assert {*recorded} == {*REQUESTS}
    for path, fields in recorded.items():
        kind = REQUESTS[path]
        names = {field.partition(".")[0].partition("[")[0] for field in fields}
        assert len(names) > 2 and not names - {*kind.model_fields} - kind.hints, path
