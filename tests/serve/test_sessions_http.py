"""Sessions over HTTP: the routes, and a server that is killed, restarted, and ended by SIGTERM."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from answering import Alone, Client, run, small
from fastapi.testclient import TestClient
from running import KEYS, TEXT, bearer, post, program, streamed

import kvkeep
from kvkeep.blocks.store import Store
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.app import application

KIND = {"method": "h2o", "budget": 24}


def body(prompt: Any, new: int, session: str = "talk", **own: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": new, "temperature": 0}
    return {**asked, "kvkeep": {"session": session}, **own}


def test_a_key_sees_and_ends_its_own_sessions_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = small()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loaded.model, "name_or_path", "models/Tiny.gguf")
    engine = Engine(loaded, 10**8, store=Store("."))
    engine.start()
    client = TestClient(application(engine, loaded, KEYS), raise_server_exceptions=False)

    def call(verb: str, path: str, key: int = 0, **given: Any) -> httpx.Response:
        return client.request(verb, path, headers=bearer(KEYS[key]), **given)

    for name in ("one", "two"):
        asked = body("the river", 4, name, kvkeep={"session": name, **KIND})
        assert call("POST", "/v1/completions", json=asked).status_code == 200
    listed = call("GET", "/v1/sessions").json()["data"]
    assert [one["name"] for one in listed] == ["two", "one"]
    assert {one.model for one in Store(".").sessions()} == {"Tiny"}
    facts = call("GET", "/v1/sessions/one").json()
    assert (facts["state"], facts["saves"], facts["method"], facts["budget"]) == ("idle", 1, "h2o", "24")
    assert facts["tokens"] > 3 and facts["bytes"] > 0 and facts["memory_bytes"] > 0
    assert call("GET", "/v1/sessions", 1).json()["data"] == []
    for verb, name, key in (("GET", "one", 1), ("DELETE", "one", 1), ("GET", "none", 0), ("DELETE", "..x", 0)):
        found = call(verb, f"/v1/sessions/{name}", key)
        assert found.status_code == 404 and found.json()["error"]["code"] == "session_not_found"
    assert client.get("/v1/sessions").status_code == 401
    assert call("DELETE", "/v1/sessions/one").json()["deleted"] is True
    assert call("GET", "/v1/sessions/one").status_code == 404 and len([*tmp_path.rglob("*.session")]) == 1
    owner = next(iter(engine.sessions.memory))[0]
    assert KEYS[0] not in owner and (tmp_path / "sessions" / owner / "two.session").is_dir()
    other = Store(tmp_path).open(f"{owner}/three")  # by another server
    for refused in (
        call("POST", "/v1/completions", json=body("the river", 4, "three")),
        call("POST", "/v1/completions", json=body("the river", 4, "three", stream=True)),
        call("DELETE", "/v1/sessions/three"),
    ):
        error = refused.json()["error"]
        assert refused.status_code == 409 and error["code"] == "session_in_use" and "'three'" in error["message"]
        assert str(tmp_path) not in error["message"] and owner not in error["message"]
    other.close()
    assert call("POST", "/v1/completions", json=body("the river", 4, "a b")).status_code == 400
    engine.stop(0)
    assert call("GET", "/v1/sessions/two").status_code == 503


@pytest.mark.slow
def test_what_was_answered_outlives_a_kill_and_sigterm_saves_the_rest(model_folder: Path, tmp_path: Path) -> None:
    """A lossy method, whose answers would differ if its session were read anew."""
    folder, loaded = tmp_path / "s", kvkeep.load(str(model_folder))
    alone = Alone(loaded, **KIND)
    options = ["--model", str(model_folder), "--memory", "50MB", "--grace", "0", "-x", "h2o", "-b", "24"]
    options += ["--sessions", str(folder)]
    first = [5 + 7 * number % 90 for number in range(40)]
    with program(*options, fork=True) as running:
        given = body(first, 5, model=running.model, logprobs=0)
        one = post(running.address, given, path=TEXT).json()
        ids = [*first, *alone.answer(first, 5), 9, 11, 13]
        assert one["choices"][0]["text"] == " " + loaded.tokenizer.decode(ids[len(first) : -3])
        with (
            pytest.raises(httpx.TransportError),
            streamed(running.address, body(ids, 400, model=running.model), TEXT) as found,
        ):
            for number, _ in enumerate(found.iter_lines()):
                if number == 6:
                    running.process.kill()
    with program(*options) as running:
        facts = httpx.get(f"{running.address}/v1/sessions/talk", headers=bearer()).json()
        assert (facts["state"], facts["saves"], facts["tokens"]) == ("parked", 1, len(first) + 4)
        two = post(running.address, body(ids, 5, model=running.model), path=TEXT).json()
        tokens = alone.answer(ids, 5)
        assert two["usage"]["prompt_tokens_details"]["cached_tokens"] == len(first) + 4
        assert two["choices"][0]["text"] == " " + loaded.tokenizer.decode(tokens)
        ids = [*ids, *tokens, 15, 17]
        with streamed(running.address, body(ids, 400, model=running.model), TEXT) as found:
            lines = (line for line in found.iter_lines() if line)
            heard = [next(lines) for _ in range(3)]
            running.process.send_signal(signal.SIGTERM)
            heard += lines
        assert heard[-1] == "data: [DONE]" and json.loads(heard[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert running.process.wait(10) == 0 and f"stored in {folder}, at most 2.0 GB" in running.said()
    (info,) = Store(folder).sessions()
    assert info.saves == 3 and not info.in_use and info.problem is None and info.tokens >= len(ids) + 2
    engine = Engine(loaded, 10**8, store=Store(folder))
    with Store(folder).read(info.name) as reference:
        known = reference.about["ids"][0]  # type: ignore[index]
    owner, _, name = info.name.partition("/")
    last = Client(engine, [*known, 19], 3, name=(owner, name))
    run(engine)
    engine.close()
    assert last.ended.cached == len(known) and last.ended.read == 1
    assert not [path for path in folder.rglob("*") if ".saving-" in path.name]
