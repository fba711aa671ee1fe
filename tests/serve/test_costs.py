"""A request costs what it says: wrong bodies end at their first error, outside the event loop, in counted memory."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from answering import small
from running import BODY, CHAT, KEYS, LOOP, TEXT, bearer, figures, held, post, raw, serving, streamed, within
from worst_bodies import REFUSED, TOKENIZE

from kvkeep.cli.serve.process import StartingApp
from kvkeep.decode.prompt import PromptText
from kvkeep.serve.engine import Engine
from kvkeep.serve.http import answer_events, answering, app, completions, connection, protocol
from kvkeep.serve.http import body as bodies
from kvkeep.serve.http import errors as http_errors
from kvkeep.serve.http.answer_events import EventBuffer
from kvkeep.serve.http.body import (
    ALWAYS_BYTES,
    MAX_CONTAINERS,
    MAX_NAMES,
    MAX_REQUEST_BYTES,
    MAX_STRINGS,
    MAX_VALUES,
    Hold,
    RequestMemory,
    read_json,
)
from kvkeep.serve.http.errors import APIError

LOOP_S = 0.5
"""Processor time that the event loop's thread may take for a body of 8 MB: ten times what it takes to receive one, and
less than to work on one."""


def loop_seconds() -> float:
    """Processor time of the thread in which the server's event loop runs."""
    (loop,) = [one for one in threading.enumerate() if one.name == LOOP]
    assert loop.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(loop.ident))


# -- wrong bodies -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as (address, _):
        yield address


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_body_has_a_few_errors_and_does_not_keep_the_event_loop(
    name: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, first = list[int](), http_errors.validation_error

    def counted(found: Any) -> APIError:
        errors.append(len(found))
        return first(found)

    monkeypatch.setattr(http_errors, "validation_error", counted)
    worst, before = REFUSED[name], loop_seconds()
    body = worst.make("tiny", worst.size)
    found = post(address, body, path=worst.path)
    assert found.status_code == worst.status, found.text
    error = found.json()["error"]
    assert error["message"].endswith(".") and len(error["message"]) < 1100 and len(error["param"] or "") <= 200
    assert all(count < 10 for count in errors), errors
    assert loop_seconds() - before < LOOP_S
    assert within(5, lambda: figures(address)["kvkeep_request_bytes"] == 0)


def test_what_grows_with_a_body_runs_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading, checking, filling the template, encoding, and writing the reply."""
    threads = dict[str, set[str]]()

    def noted(module: Any, name: str) -> None:
        inner = getattr(module, name)

        def noting(*given: Any, **named: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return inner(*given, **named)

        monkeypatch.setattr(module, name, noting)

    for module, name in (
        (bodies, "read_json"),
        (http_errors, "validation_error"),
        (protocol, "prompt_text"),
        (bodies, "json_text"),
    ):
        noted(module, name)
    with serving() as (address, _):
        large = {**BODY, "messages": [{"role": "user", "content": "the " * 20_000}]}
        for body in (BODY, large, {**BODY, "n": 700}, {**BODY, "logprobs": True}):
            post(address, body)
        assert post(address, {"prompt": "the " * 20_000}, path=TOKENIZE).json()["count"] == 20_000
        for path in ("/v1/sessions", "/metrics"):
            assert httpx.get(address + path, headers=bearer()).status_code == 200
    assert len(threads) == 4 and all(LOOP not in names for names in threads.values()), threads
    assert any("large" in name for name in threads["read_json"]), "one at a time"


@pytest.mark.parametrize(
    ("change", "field", "limit"),
    [
        ({"messages": [{"role": "user", "content": "a"}] * 10_001}, "messages", "10000"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1001}]}, "messages.0", "1000"),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"model": "m" * 1001}, "model", "1000"),
        ({"kvkeep": {"session": "s" * 201}}, "kvkeep.session", "200"),
        ({"kvkeep": dict.fromkeys(map(str, range(101)), 1)}, "kvkeep", "100"),
        ({"max_tokens": 400, "logprobs": True, "top_logprobs": 20}, "max_tokens", "95"),
    ],
)
def test_each_limit_has_a_name_a_number_and_a_remedy(
    change: dict[str, Any], field: str, limit: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "MAX_LOGPROBS", 2000)
    found = post(address, BODY | change)
    error = found.json()["error"]
    assert found.status_code == 400 and error["param"].startswith(field), error
    assert limit in error["message"] and any(word in error["message"] for word in ("; send", "; s", "; j", "; leave"))


@pytest.mark.parametrize(
    ("one", "each", "limit", "what"),
    [
        ("[]", 1, MAX_CONTAINERS, "objects and lists"),
        ('{"a":1,"b":2,"c":"[{:,"}', 3, MAX_NAMES, "fields"),
        ("1", 1, MAX_VALUES, "values"),
        ('"\\\\"', 1, MAX_STRINGS, "strings"),
        ('"\\""', 1, MAX_STRINGS, "strings"),
    ],
)
def test_structure_is_counted_exactly(one: str, each: int, limit: int, what: str) -> None:
    count = limit // each - 1
    assert len(read_json(("[" + ",".join([one] * count) + "]").encode())) == count
    with pytest.raises(APIError, match=f"more than {limit:,} {what}; send fewer"):
        read_json(("[" + ",".join([one] * (count + 3)) + "]").encode())


def test_json_of_replies_is_that_of_the_library() -> None:
    dice = random.Random(2)

    def value(depth: int) -> Any:
        if depth and dice.random() < 0.7:
            if dice.random() < 0.5:
                return {f"{number} é\n": value(depth - 1) for number in range(dice.randrange(5))}
            return [value(depth - 1) for _ in range(dice.choice([0, 1, 255, 256, 257, 600]) if depth == 1 else 3)]
        return dice.choice([1, -2.5, 1e300, 'a"b\\ü🦜', None, True, [], {}])

    for _ in range(200):
        given = value(3)
        assert bodies.json_text(given) == json.dumps(given, ensure_ascii=False, separators=(",", ":"))


# -- memory -----------------------------------------------------------------------------------------------


def test_bodies_that_arrive_take_memory_as_far_as_they_have_arrived_and_not_beyond_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "MAX_REQUEST_BYTES", 10**6)
    with serving() as (address, _), ExitStack() as stack:
        host, _, port = address.removeprefix("http://").partition(":")

        def upload(count: int) -> socket.socket:
            one = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            head = (
                f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Length: 7000000\r\n\r\n"
            )
            one.sendall(head.encode() + b" " * count)
            return one

        trickling = [upload(100), upload(600_000)]
        assert within(10, lambda: figures(address)["kvkeep_request_bytes"] == 600_100)
        refused = upload(600_000).recv(2000)
        assert refused.startswith(b"HTTP/1.1 503") and b"retry-after" in refused.lower() and b"overloaded" in refused
        assert post(address, BODY).status_code == 200  # small ones are never refused
        for one in trickling:
            one.close()
        assert within(10, lambda: figures(address)["kvkeep_request_bytes"] == 0)


def request_bytes(address: str) -> float:
    return figures(address)["kvkeep_request_bytes"]


def test_a_client_that_leaves_the_queue_of_large_bodies_leaves_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate, encoded = threading.Event(), threading.Event(), list[int]()

    def slow(tokenizer: Any, messages: Any, **named: Any) -> PromptText:
        begun.set()
        encoded.append(len(messages[0]["content"]))
        gate.wait(30)
        return PromptText("the river")

    monkeypatch.setattr(protocol, "prompt_text", slow)
    asked = [{"messages": [{"role": "user", "content": "a" * length}]} for length in (200_000, 300_000)]
    with serving() as (address, _):
        first = threading.Thread(target=post, args=(address, asked[0]), kwargs={"path": TOKENIZE})
        first.start()
        assert begun.wait(10)
        with raw(address, asked[1], TOKENIZE):
            assert within(10, lambda: request_bytes(address) > 500_000)
        assert within(10, lambda: request_bytes(address) < 210_000)
        gate.set()
        first.join(30)
        assert within(10, lambda: request_bytes(address) == 0) and encoded == [200_000]


def test_small_requests_hold_what_they_need_whatever_others_hold() -> None:
    memory = RequestMemory(10**6)
    large, small_one = Hold(memory), Hold(memory)
    large.resize(10**6)
    small_one.resize(ALWAYS_BYTES)
    with pytest.raises(APIError, match="retry in a moment"):
        small_one.resize(ALWAYS_BYTES + 1)
    large.resize(500_000)  # less is always possible
    small_one.resize(400_000)
    small_one.release()
    large.release()
    assert memory.bytes == 0 < MAX_REQUEST_BYTES


def test_of_requests_that_arrive_before_the_model_as_many_wait_as_may() -> None:
    async def statuses() -> tuple[list[int], list[int]]:
        starting, found = StartingApp(3), list[int]()

        async def send(message: Any) -> None:
            found.extend([message["status"]] if "status" in message else [])

        async def loaded(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        def ask(path: str) -> asyncio.Task[None]:
            scope = {"type": "http", "method": "POST", "path": path, "headers": []}
            return asyncio.ensure_future(starting(scope, None, send))

        tasks = [ask(CHAT) for _ in range(10)]
        await asyncio.sleep(0.1)
        early, starting.app = [*found], loaded
        assert starting.waiting == 3
        await asyncio.gather(*tasks, ask(CHAT))
        assert starting.waiting == 0
        return early, found[len(early) :]

    assert asyncio.run(statuses()) == ([503] * 7, [200] * 4)


# -- slow readers -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_thirty_who_read_nothing_take_bounded_memory_and_others_their_whole_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_events, "MAX_BUFFERED_BYTES", 300_000)
    most, put = [0], EventBuffer.put

    def noted(self: EventBuffer, event: Any) -> None:
        put(self, event)
        most[0] = max(most[0], self.bytes)

    monkeypatch.setattr(EventBuffer, "put", noted)
    long = {**BODY, "max_tokens": 480, "logprobs": True, "top_logprobs": 20, "stream": True}
    with serving(engine=Engine(small(), 10**9)) as (address, engine), ExitStack() as stack:
        readers = [stack.enter_context(raw(address, long)) for _ in range(30)]
        assert within(30, lambda: len(engine.running) == 30)
        with streamed(address, {**long, "max_tokens": 300}) as found:
            lines = [line for line in found.iter_lines() if line.startswith("data: {")]
        tokens = [
            one
            for line in lines
            for one in (json.loads(line[6:])["choices"][0].get("logprobs") or {}).get("content", [])
        ]
        assert len(tokens) == 300
        assert within(60, lambda: not engine.running)
        assert 300_000 < most[0] < 300_000 + 20 * 3500  # a step's tokens beyond the limit
        readers[0].settimeout(10)
        told = b""
        while b"[DONE]" not in told:
            told += readers[0].recv(1 << 16)
        assert b"reads too slowly" in told and b'"code":"too_slow"' in told


# -- connections ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_silent_connections_make_way_and_busy_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "connection_limit", lambda: 8)
    with serving() as (address, engine), ExitStack() as stack:
        host, _, port = address.removeprefix("http://").partition(":")

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection((host, int(port)), timeout=10))

        silent = [connect() for _ in range(40)]
        assert httpx.get(f"{address}/health").status_code == 200
        assert silent[0].recv(10) == b"", "the one that was silent for longest is closed"
        with held(engine):
            for _ in range(8):
                stack.enter_context(raw(address, {**BODY, "stream": True}))
            assert within(10, lambda: engine.waiting == 8)
            refused = httpx.get(f"{address}/health")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
            assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
        assert within(20, lambda: not engine.running and not engine.waiting)
        assert within(10, lambda: answers(address))


def answers(address: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{address}/health").status_code == 200
    return False


def test_few_open_files_leave_some_to_connections_and_some_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    for files, least, most in ((64, connection.MIN_CONNECTIONS, 24), (1024, 100, 504), (10**6, 1000, 1000)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, files=files: (files, files))
        assert least <= connection.connection_limit() <= most


@pytest.mark.parametrize("key", [KEYS[0], "wrong"])
def test_a_body_of_tiny_chunks_is_not_read(key: str, address: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nor one that goes on after it was refused; chunks as clients send them are read."""
    host, _, port = address.removeprefix("http://").partition(":")
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    for size, read in ((1, False), (1000, True)):
        before = loop_seconds()
        with socket.create_connection((host, int(port)), timeout=10) as one:
            one.sendall(head.encode())
            with suppress(ConnectionError):
                one.sendall((f"{size:x}\r\n".encode() + b" " * size + b"\r\n") * (100_000 // size) + b"0\r\n\r\n")
            told = b""
            with suppress(ConnectionError):
                told = one.recv(1000)
        if key == KEYS[0]:
            assert told.startswith(b"HTTP/1.1 400") and (b"invalid_json" in told) == read
        assert loop_seconds() - before < LOOP_S
    assert "Fatal error" not in caplog.text and httpx.get(f"{address}/health").status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        "GET /health HTTP/1.1\r\nHost: localhost\r\n" + "X-A: b\r\n" * 100_000 + "\r\n",
        "GET /" + "a" * 1_000_000 + " HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "\0" * 100_000,
    ],
)
def test_long_headers_are_refused(head: str, address: str) -> None:
    host, _, port = address.removeprefix("http://").partition(":")
    before = loop_seconds()
    with socket.create_connection((host, int(port)), timeout=10) as one, suppress(ConnectionError):
        one.sendall(head.encode())
        assert one.recv(1000).startswith(b"HTTP/1.1 4")
    assert loop_seconds() - before < LOOP_S
    assert httpx.get(f"{address}/health").status_code == 200


def test_the_documentation_states_the_limits_that_there_are() -> None:
    rows = (Path(__file__).parents[2] / "docs" / "serving.md").read_text().partition("## Limits")[2].partition("## ")[0]
    numbers = (
        protocol.MAX_PROMPT_CHARACTERS, protocol.MAX_PROMPT_TOKENS, answering.MAX_LOGPROBS,
        completions.MAX_MESSAGES, completions.MAX_PARTS, protocol.MAX_STOPS,
        protocol.MAX_STOP, protocol.MAX_NAME, protocol.MAX_OPTION, protocol.MAX_FIELDS, MAX_CONTAINERS,
        MAX_NAMES, MAX_STRINGS, MAX_VALUES,
        MAX_REQUEST_BYTES // 10**6, ALWAYS_BYTES // 1000, connection.FREE_CHUNKS, connection.CHUNK_BYTES,
        connection.MAX_HEADER_BYTES // 1024, connection.MAX_CONNECTIONS, answer_events.MAX_BUFFERED_BYTES // 10**6,
    )  # fmt: skip
    assert {f"{number:,}" for number in numbers} <= {*re.findall("[0-9][0-9,]*[0-9]|[0-9]", rows)}
