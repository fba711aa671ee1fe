"""Answers that a request names: the server completes them without their client, and others follow them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from answering import small
from running import BODY, KEYS, bearer, held, post, serving, streamed, within

from kvkeep.engine.sampling import LLAMA_SERVER
from kvkeep.serve.engine import Engine
from kvkeep.serve.http import kept_answers

NEW = 12
NAMED = {**BODY, "max_tokens": NEW, "stream": True, "kvkeep": {"session": "talk", "answer": "one"}}
PATH = "/v1/sessions/talk/answers/one"


@pytest.fixture
def server() -> Iterator[tuple[str, Engine]]:
    with serving() as (address, engine):
        yield address, engine


def text(stream: str) -> str:
    events = [json.loads(one[6:]) for one in stream.split("\n\n") if one.startswith("data: {")]
    return "".join(one["choices"][0]["delta"].get("content", "") for one in events if one["choices"])


def follow(address: str, path: str = PATH, key: str = KEYS[0]) -> httpx.Response:
    return httpx.get(address + path, headers=bearer(key), timeout=30)


def test_an_answer_goes_on_without_its_client_and_others_follow_it(server: tuple[str, Engine]) -> None:
    address, engine = server
    whole = post(address, {**BODY, "max_tokens": NEW}).json()["choices"][0]["message"]["content"]
    with streamed(address, NAMED) as stream:
        lines = stream.iter_lines()
        while '"content":""' not in next(lines):
            pass  # until it has begun; then its client goes away
    found = follow(address)
    assert text(found.text) == whole and found.text.endswith("data: [DONE]\n\n")
    assert found.headers["content-type"].startswith("text/event-stream")
    assert follow(address).text == found.text  # again, after its end
    (session,) = [one for one in engine.sessions.memory.values() if one.name is not None]
    assert len(session.past.ids) > NEW


def test_two_clients_read_the_same_events(server: tuple[str, Engine]) -> None:
    address, engine = server
    later: dict[str, Any] = {"headers": bearer(), "timeout": 30}
    with (
        held(engine) as gate,
        streamed(address, NAMED) as first,  # its status comes before its first token
        httpx.stream("GET", address + PATH, **later) as second,
    ):
        gate.set()
        one, two = first.read(), second.read()
    assert one == two and text(one.decode())


def test_stopping_keeps_what_is_written(server: tuple[str, Engine]) -> None:
    address, engine = server
    with streamed(address, NAMED | {"max_tokens": 400}) as stream:
        lines = stream.iter_lines()
        while '"content":"' not in (line := next(lines)) or '"content":""' in line:
            pass
        again = post(address, NAMED)
        assert again.status_code == 409 and again.json()["error"]["code"] == "answer_exists"
        found = httpx.post(f"{address}{PATH}/cancel", headers=bearer())
        assert found.json() == {"name": "one", "object": "answer", "cancelled": True}
        rest = "\n".join(lines)
    assert '"finish_reason":"length"' in rest and "[DONE]" in rest
    assert within(5, lambda: not engine.running)
    assert text(follow(address).text)


def test_an_answer_belongs_to_its_key_and_goes_with_its_session(server: tuple[str, Engine]) -> None:
    address, _ = server
    assert post(address, NAMED).status_code == 200
    assert follow(address).status_code == 200
    for path, key in ((PATH, KEYS[1]), (PATH.replace("one", "two"), KEYS[0]), (PATH.replace("talk", "walk"), KEYS[0])):
        found = follow(address, path, key)
        assert found.status_code == 404 and found.json()["error"]["code"] == "answer_not_found"
    assert httpx.post(f"{address}{PATH}/cancel").status_code == 401
    assert httpx.delete(f"{address}/v1/sessions/talk", headers=bearer()).status_code == 200
    assert follow(address).status_code == 404


def test_a_refused_request_leaves_no_answer(server: tuple[str, Engine]) -> None:
    address, _ = server
    for change, field in (
        ({"kvkeep": {"answer": "one"}}, "kvkeep.answer"),
        ({"stream": False}, "kvkeep"),
        ({"kvkeep": {"session": "talk", "answer": "one", "budget": "lots", "method": "h2o"}}, "kvkeep.budget"),
    ):
        found = post(address, NAMED | change)
        assert found.status_code == 400 and found.json()["error"]["param"] == field, change
    assert follow(address).status_code == 404


def test_the_oldest_answers_make_way(server: tuple[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    address, _ = server
    size = len(post(address, NAMED).content)
    monkeypatch.setattr(kept_answers, "MAX_KEPT_BYTES", 2 * size + size // 2)
    for name in ("two", "three"):
        assert post(address, NAMED | {"kvkeep": {"session": "talk", "answer": name}}).status_code == 200
    status = [follow(address, PATH.replace("one", name)).status_code for name in ("one", "two", "three")]
    assert status == [404, 200, 200]


def test_an_answer_of_the_greatest_length_ends(server: tuple[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "MAX_ANSWER_BYTES", 2000)
    found = post(server[0], NAMED | {"max_tokens": 400}).text
    assert 2000 < len(found) < 20_000 and '"finish_reason":"length"' in found and found.endswith("data: [DONE]\n\n")


def test_fields_of_sampling_that_a_request_leaves_out_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(small(), 10**8)
    asks: list[Any] = []
    submit = engine.submit

    def recorded(ask: Any, *given: Any, **named: Any) -> Any:
        asks.append(ask)
        return submit(ask, *given, **named)

    monkeypatch.setattr(engine, "submit", recorded)
    with serving(engine=engine) as (address, _):
        body = {name: one for name, one in BODY.items() if name != "temperature"}
        for more in ({}, {"temperature": 0}, {"top_k": 0, "presence_penalty": 1.5}):
            assert post(address, {**body, **more}).status_code == 200
        (model,) = httpx.get(f"{address}/v1/models", headers=bearer()).json()["data"]
    first, greedy, others = (ask.sampling for ask in asks)
    assert first == LLAMA_SERVER and not greedy.sampled
    assert (others.temperature, others.top_k, others.presence) == (0.8, 0, 1.5)
    assert model["kvkeep"]["sampling"]["top_k"] == 40 and model["kvkeep"]["sampling"]["repetition_penalty"] == 1.0


def test_an_answer_that_is_stopped_before_it_begins_ends_at_once() -> None:
    async def events() -> AsyncIterator[str]:
        while not stopped:
            await asyncio.sleep(0)
        yield "data: the end\n\n"

    async def run() -> list[str]:
        answer = answers.begin(("key", "talk", "one"))
        answers.get(("key", "talk", "one")).stop()
        answer.fill(events(), lambda: stopped.append(True), lambda: None)
        return [one async for one in answer.follow()]

    stopped: list[bool] = []
    answers = kept_answers.KeptAnswers()
    assert asyncio.run(run()) == ["data: the end\n\n"] and stopped == [True]


def test_a_session_may_be_deleted_while_its_answer_is_refused() -> None:
    answers = kept_answers.KeptAnswers()
    key = ("key", "talk", "one")
    first = answers.begin(key)
    answers.forget("key", "talk")
    second = answers.begin(key)
    answers.remove(key, first)
    assert answers.get(key) is second and first.done and not second.done
