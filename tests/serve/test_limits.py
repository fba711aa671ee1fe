"""Limits: a request without a key, too large, too slow, or about the text of another key is refused."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from answering import small
from running import BODY, KEYS, bearer, figures, held, post, serving, streamed, within

from kvkeep.blocks.store import Store
from kvkeep.cli.serve.address import Address, https
from kvkeep.engine import answer
from kvkeep.errors import UsageError
from kvkeep.serve.engine import Engine
from kvkeep.serve.http import answer_events, answering, connection
from kvkeep.serve.http import body as bodies
from kvkeep.serve.http.answer_events import Limits
from kvkeep.serve.http.app import application
from kvkeep.serve.http.keys import kept_key, keys_given

REJECTED = "kvkeep_requests_rejected_total"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Engine]]:
    with serving() as running:
        yield running


def reply(path: str = "/v1/models", host: str = "localhost", keys: list[str] = KEYS, **given: Any) -> httpx.Response:
    """What an application answers of itself, without a server around."""
    loaded = small()
    origins = given.pop("origins", ())
    app = application(Engine(loaded, 10**8), loaded, keys, origins=origins)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return await client.request(given.pop("method", "GET"), path, **given)

    return asyncio.run(ask())


def test_keys_come_from_a_file_and_a_made_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setenv("KVKEEP_API_KEYS", "one, two")
    file = tmp_path / "keys"
    file.write_text("# of the kitchen\nthree # mine\n\n  four  \n")
    assert keys_given(str(file)) == ["one", "two", "three", "four"]
    key, path, new = kept_key()
    assert new and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert kept_key() == (key, path, False) and path.stat().st_mode & 0o777 == 0o600
    for where, sentence in (("environ", "Key 2 of KVKEEP_API_KEYS"), ("file", f"Key 1 of '{file}'")):
        monkeypatch.setenv("KVKEEP_API_KEYS", "one,ключ" if where == "environ" else "one")
        file.write_text("кухня\n", encoding="utf-8")
        with pytest.raises(UsageError, match="not ASCII") as found:
            keys_given(str(file))
        assert sentence in str(found.value) and "ключ" not in str(found.value)
    monkeypatch.setenv("KVKEEP_API_KEYS", "one, two")
    with pytest.raises(UsageError, match="Nothing can be saved in .* is a file, not a folder"):
        Store(file / "chats").check_writable()
    Store(tmp_path / "not" / "yet").check_writable()
    file.write_text("one two\n")
    with pytest.raises(UsageError, match="contains a space"):
        keys_given(str(file))
    file.write_text("# none\n")
    for wrong, sentence in (
        (["--keys", str(file)], "contains no keys"),
        (["--keys", str(tmp_path / "nowhere")], "cannot be read: no such file"),
        (["--cors", "chat.example"], "is not an origin"),
        (["--certificate", str(file)], "needs both"),
        (["--certificate", str(file), "--private-key", str(file)], "cannot be used for HTTPS"),
    ):
        code, _, err = run("serve", *wrong)
        assert code == 2 and sentence in err and "Traceback" not in err
    monkeypatch.delenv("KVKEEP_API_KEYS")
    assert "Without a key, every website" in run("serve", "--cors", "*")[2]


def test_a_key_has_so_many_answers_at_once_and_no_other_key_notices() -> None:
    with serving(limits=Limits(answers=2)) as (address, engine):
        results: list[int] = []
        with held(engine):
            threads = [threading.Thread(target=lambda: results.append(post(address, BODY).status_code)) for _ in "ab"]
            for thread in threads:
                thread.start()
            assert within(5, lambda: engine.waiting == 2)
            refused = post(address, BODY)
            assert refused.status_code == 429 and int(refused.headers["Retry-After"]) > 0
            assert refused.json()["error"]["type"] == "rate_limit_error"
            other = threading.Thread(target=lambda: results.append(post(address, BODY, KEYS[1]).status_code))
            other.start()
            assert within(5, lambda: engine.waiting == 3)
        for thread in (*threads, other):
            thread.join(10)
        assert results == [200] * 3 and post(address, BODY).status_code == 200
        assert post(address, {**BODY, "kvkeep": {"method": "magic"}}).status_code == 400  # whose place is free again
        assert [post(address, BODY).status_code for _ in range(3)] == [200] * 3


def test_time_cuts_an_answer_at_a_token_and_one_that_did_not_begin_is_an_error() -> None:
    with serving(limits=Limits(seconds=0.5)) as (address, engine):
        with streamed(address, {**BODY, "max_tokens": 450}) as found:
            lines = found.iter_lines()
            next(lines)
            with held(engine):
                time.sleep(0.6)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "length" and len(events) < 440
        assert figures(address)['kvkeep_requests_ended_total{reason="length"}'] == 1
        with held(engine):
            late = threading.Thread(target=lambda: answers.append(post(address, BODY)))
            answers: list[httpx.Response] = []
            late.start()
            assert within(5, lambda: engine.waiting == 1)
            time.sleep(0.6)
        late.join(10)
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "timeout"
        counted = {name for name in figures(address) if name.startswith(("kvkeep_requests_ended_total", REJECTED))}
        assert counted == {'kvkeep_requests_ended_total{reason="length"}', REJECTED + '{reason="timeout"}'}


def test_comments_keep_a_stream_open_and_what_fails_in_it_is_an_error_object(
    server: tuple[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_events, "FIRST_EVENT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(answer_events, "PROGRESS_S", 0.05)
    address, engine = server
    for own, last in (({}, '"finish_reason":"length"'), ({"kvkeep": {"budget": "1KB"}}, '"error":{"message"')):
        with held(engine) as gate, streamed(address, {**BODY, **own}) as found:
            lines = (line for line in found.iter_lines() if line)
            assert found.status_code == 200 and '"role"' in next(lines)
            assert all(re.fullmatch(r": reading 0 of \d+ tokens", next(lines)) for _ in range(2))
            gate.set()
            rest = [*lines]
        assert rest[-1] == "data: [DONE]" and last in rest[-2]
    counted = figures(address)
    assert counted[REJECTED + '{reason="budget"}'] == 1  # a client's mistake, and no failure
    assert 'kvkeep_requests_ended_total{reason="failed"}' not in counted


def test_a_stream_tells_how_much_of_its_prompt_is_read(
    server: tuple[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And begins as soon as there is something to tell."""
    address, engine = server
    monkeypatch.setattr(answer_events, "PROGRESS_S", 0.02)
    monkeypatch.setattr(answer, "CHUNK", 4)
    step = engine.step

    def slow(wait: bool = False) -> bool:
        time.sleep(0.03)
        return step(wait)

    monkeypatch.setattr(engine, "step", slow)
    body = {**BODY, "messages": [{"role": "user", "content": "the river " * 20}], "max_tokens": 1}
    with streamed(address, {**body, "stream_options": {"include_usage": True}}) as found:
        lines = [line for line in found.iter_lines() if line]
    usage = json.loads(lines[-2].removeprefix("data: "))["usage"]
    told = [re.fullmatch(r": reading (\d+) of (\d+) tokens", line) for line in lines if line.startswith(":")]
    read = [int(one[1]) for one in told if one]
    assert {int(one[2]) for one in told if one} == {usage["prompt_tokens"]}
    assert read == sorted(read) and len({*read}) > 3 and read[-1] <= usage["prompt_tokens"]


def test_headers_that_never_end_are_let_go(server: tuple[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_S", 0.3)
    address, _ = server
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as slow:
        for byte in b"GET /health":
            try:
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
            except ConnectionError:
                break
        with pytest.raises(ConnectionError):
            if not slow.recv(1):
                raise ConnectionError
    with httpx.Client(headers=bearer()) as client:  # and a connection that is kept is used again
        assert [client.get(f"{address}/v1/models").status_code for _ in range(3)] == [200] * 3
        time.sleep(0.5)
        assert client.get(f"{address}/v1/models").status_code == 200


@pytest.mark.parametrize("length", ["Content-Length: 100\r\n", "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n"])
def test_a_body_that_is_slow_or_has_two_lengths_ends_its_connection(
    server: tuple[str, Engine], length: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RFC 9112, 6.3; and a client that goes on sending a slow body is not waited for any longer."""
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.3)
    address, _ = server
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as one:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n{length}\r\n"
        one.sendall(head.encode())
        begun, answer = time.monotonic(), b""
        with suppress(ConnectionError):
            while part := one.recv(4096):  # to the end of the connection
                answer += part
                one.sendall(b" ")
    status = b"HTTP/1.1 400" if "Transfer" in length else b"HTTP/1.1 408"
    assert answer.startswith(status) and b"connection: close" in answer.lower()
    assert time.monotonic() - begun < 3


def test_other_origins_and_hosts_stay_out_unless_asked_for() -> None:
    origin = {"Origin": "https://chat.example"}
    assert "access-control-allow-origin" not in reply(headers=bearer() | origin).headers
    own = reply(headers=bearer() | origin, origins=["https://chat.example"])
    assert own.status_code == 200 and own.headers["access-control-allow-origin"] == "https://chat.example"
    asks = origin | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert reply(method="OPTIONS", headers=asks, origins=["https://chat.example"]).status_code == 200
    assert reply(method="OPTIONS", headers=asks).status_code == 401
    for host, status in (("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 403)):
        assert reply(host=host, keys=[]).status_code == status, host
    assert reply(host="chat.example", headers=bearer()).status_code == 200
    text = json.dumps(BODY)  # as a form of another page may send it without being asked
    simple = {"method": "POST", "content": text, "keys": [], "headers": {"Content-Type": "text/plain"}}
    assert reply("/v1/chat/completions", **simple).status_code == 400


def test_heads_and_wrong_methods() -> None:
    for path in ("/", "/health", "/v1/models"):
        whole, head = reply(path, headers=bearer()), reply(path, method="HEAD", headers=bearer())
        assert whole.status_code == head.status_code == 200 and not head.content
        assert head.headers["content-length"] == whole.headers["content-length"] == str(len(whole.content))
    assert reply(method="HEAD").status_code == 401
    wrong = reply("/v1/chat/completions", method="HEAD", headers=bearer())
    assert (wrong.status_code, wrong.headers["allow"], wrong.content) == (405, "POST", b"")
    hosts = ("0.0.0.0", "::", "::1", "chat")
    assert [Address(one, 0).local_host for one in hosts] == ["127.0.0.1", "[::1]", "[::1]", "chat"]


def test_deep_json_is_refused_and_a_fault_is_logged_without_its_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"method": "POST", "headers": bearer() | {"Content-Type": "application/json"}}
    for deep in (b"[" * 100_000 + b"]" * 100_000, b'{"messages":' * 100_000 + b"1" + b"}" * 100_000):
        found = reply("/v1/chat/completions", content=deep, **given)
        assert found.status_code == 400 and found.json()["error"]["type"] == "invalid_request_error"

    async def broken(self: Any, given: Any, *others: Any, **named: Any) -> None:
        raise RuntimeError(f"cannot read '{given().messages[0]['content']}'")

    monkeypatch.setattr(answering.Answering, "encode", broken)
    caplog.set_level("INFO", "kvkeep.requests")
    found = reply("/v1/chat/completions", json=BODY, method="POST", headers=bearer())
    assert found.status_code == 500 and "river" not in found.text + caplog.text
    assert "RuntimeError" in caplog.text and "test_limits.py" in caplog.text
    assert f"{found.headers['x-request-id']} POST /v1/chat/completions 500" in caplog.text


def test_https_by_a_certificate(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate")
    names = [str(tmp_path / name) for name in ("certificate.pem", "key.pem")]
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    make += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-out", names[0], "-keyout", names[1]]
    subprocess.run(make, check=True, capture_output=True)
    with pytest.raises(UsageError, match="needs both"):
        https(names[0], None)
    with serving(tls=https(names[0], names[1])) as (address, _):
        context = ssl.create_default_context(cafile=names[0])
        assert httpx.get(f"{address}/v1/models", headers=bearer(), verify=context).status_code == 200
