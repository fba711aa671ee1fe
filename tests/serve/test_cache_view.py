"""What the server shows of a cache is what the cache says, to the key that it belongs to."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from answering import Client, small, text
from conftest import tokenizer
from running import BODY, KEYS, bearer, held, post, serving

from kvkeep.contracts.entries import EntryState
from kvkeep.decode.prompt import encode
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.sessions import cache_view

COLUMNS = 7


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Engine]]:
    with serving() as running:
        yield running


def get(address: str, path: str, key: str = KEYS[0]) -> httpx.Response:
    return httpx.get(address + path, headers=bearer(key), timeout=30)


@pytest.mark.parametrize(("method", "budget"), [("h2o", 24), ("kv-direct", 24), ("revive", 40), ("full", None)])
def test_a_view_is_what_the_cache_says(method: str, budget: int | None) -> None:
    with serving() as (address, engine):
        own = {"session": "my.talk", "method": method} | ({} if budget is None else {"budget": budget})
        messages = [{"role": "user", "content": "the river and the stone " * 8}]
        post(address, {**BODY, "messages": messages, "max_tokens": 9, "kvkeep": own}).raise_for_status()
        found: dict[str, Any] = get(address, f"/v1/sessions/my.talk/cache?columns={COLUMNS}&texts=true").json()
        assert get(address, "/v1/sessions/my.talk/cache", KEYS[1]).status_code == 404
        (session,) = engine.sessions.memory.values()
        cache = session.past.cache
        states = torch.cat([layer[0] for layer in cache.entry_states()])  # (lanes, tokens)
        tokens, heads = states.shape[1], states.shape[0] // found["layers"]
        assert (found["tokens"], found["columns"], found["method"]) == (tokens, COLUMNS, method)
        assert found["budget"] == budget and not found["running"] and found["prompt"] is None
        special = {*tokenizer().all_special_ids}
        assert found["special"] == [place for place, one in enumerate(session.past.ids) if one in special]
        assert len(found["texts"]) == tokens and "".join(found["texts"]) == tokenizer().decode(session.past.ids)
        assert session.past.ids[: len(encode(tokenizer(), messages))] == encode(tokenizer(), messages)
        for state, packed in found["map"].items():
            code, shown = EntryState[state.upper()], base64.b64decode(packed)
            assert found["entries"][state] == int((states == code).sum())
            for layer in range(found["layers"]):
                rows = states[layer * heads : (layer + 1) * heads]
                for column in range(COLUMNS):
                    slots = [slot for slot in range(tokens) if slot * COLUMNS // tokens == column]
                    share = float((rows[:, slots] == code).float().mean())
                    assert abs(shown[layer * COLUMNS + column] / 255 - share) < 1 / 200
            shares = (states == code).float().mean(0)
            kept = torch.tensor([*base64.b64decode(found["kept"][state])]) / 255
            assert (kept - shares).abs().max() < 1 / 200
        assert sum(found["entries"].values()) == states.numel()
        memory = cache.memory()
        assert found["bytes"]["resident"] == memory.resident_bytes
        assert found["bytes"]["checkpoint_disk"] == memory.checkpoint_bytes["disk"]
        whole = get(address, "/v1/memory").json()
        kinds = found["bytes"]
        assert whole["kinds"] == kinds and whole["held"] == sum(kinds.values()) - kinds["checkpoint_disk"]


def test_methods_are_listed_and_a_busy_engine_keeps_nobody_waiting_for_ever(
    server: tuple[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvkeep.serve.http import sessions

    address, engine = server
    found = get(address, "/v1/methods").json()
    known = {one["name"]: one for one in found["data"]}
    assert known["h2o"]["exactness"] == "lossy" and known["h2o"]["budgeted"] and not known["full"]["budgeted"]
    assert found["default"] == {"method": "full", "budget": None}
    for name, own in known.items():  # every one of them can be asked for
        budget = {"budget": "25%"} if own["budgeted"] else {}
        method = "endless+passages:count=2,size=16" if name == "endless" else name  # within 512 positions
        answer = post(address, {**BODY, "max_tokens": 1, "kvkeep": {"method": method, **budget}})
        assert answer.status_code == 200, (name, answer.text)
    monkeypatch.setattr(sessions, "ENGINE_TIMEOUT_S", 0.1)
    with held(engine):
        assert get(address, "/v1/memory").status_code == 503
    assert get(address, "/v1/memory").status_code == 200
    assert get(address, "/v1/sessions/none/cache").status_code == 404
    assert get(address, "/v1/sessions/none/cache?columns=0").status_code == 400


def test_while_a_prompt_is_read_it_says_how_far() -> None:
    engine, ids = Engine(small(), 10**9), text(60, 1)
    client = Client(engine, ids, name=("me", "talk"), method="h2o", budget=24, chunk=16)
    read = []
    while not client.done:
        engine.step()
        if (view := cache_view(engine, ("me", "talk"))) is not None and view.facts["prompt"] is not None:
            read.append(len(view.ids))
            assert view.facts["prompt"] == 60 and view.facts["running"]
    assert len(read) == 3 and read == sorted({*read}) and read[-1] < 60
    view = cache_view(engine, ("me", "talk"))
    assert view is not None and view.facts["prompt"] is None and not view.facts["running"]
