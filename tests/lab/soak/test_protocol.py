"""The protocol: OpenAI's own client, wrong requests, and sessions of several keys."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from answering import small
from running import ASK, BODY, CHAT, KEYS, TEXT, bearer, crowded, held, post, serving, within

import kvkeep
from kvkeep import KeepCache
from kvkeep.blocks.store import Store
from kvkeep.decode.prompt import encode
from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.answer_events import Limits
from kvkeep.serve.http.completions import ChatRequest, Message, StreamOptions, TextRequest, TokenizeRequest
from kvkeep.serve.http.protocol import Extension

QUESTIONS = [
    "What is the capital of France?",
    "Count to ten.",
    "Write a line about the sea.",
    "Who wrote Hamlet?",
    "Name three colours.",
    "What is 2 + 2?",
    "Say hello.",
    "Why is the sky blue?",
]
NEW = 32


def asking(question: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": NEW, "temperature": 0}


@pytest.mark.real
@pytest.mark.soak(1)
def test_openais_client_gets_correct_answers_and_typed_errors(real: Loaded, say: Any, tmp_path: Path) -> None:
    single = {}
    for question in QUESTIONS:
        ids = encode(real.tokenizer, asking(question)["messages"])
        made = kvkeep.generate(real.model, real.tokenizer, ids, KeepCache(real.model, "full"), max_new_tokens=NEW)
        single[question] = made.text, len(ids), len(made.tokens)
    streaming: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    seen = Counter[str]()

    def check(question: str, text: str | None, usage: Any) -> None:
        assert (text, usage.prompt_tokens, usage.completion_tokens) == single[question], question
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        seen["answers"] += 1
        seen["tokens"] += usage.completion_tokens

    def joined(chunks: list[Any]) -> str:
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason
        assert not chunks[-1].choices and all(one.usage is None for one in chunks[:-1])
        return "".join(one.choices[0].delta.content or "" for one in chunks[:-1])

    with serving(engine=Engine(real, 10**9, method="full")) as (address, _):
        given: dict[str, Any] = {"base_url": f"{address}/v1", "api_key": KEYS[0], "max_retries": 0}
        with openai.OpenAI(**given) as client:
            for question in QUESTIONS:
                complete = client.chat.completions.create(**asking(question))
                check(question, complete.choices[0].message.content, complete.usage)
                chunks = [*client.chat.completions.create(**asking(question), **streaming)]
                check(question, joined(chunks), chunks[-1].usage)
                say.progress(f"{seen['answers']} answers")

        async def at_once() -> None:
            async with openai.AsyncOpenAI(**given) as client:

                async def one(question: str, stream: bool) -> None:
                    if not stream:
                        complete = await client.chat.completions.create(**asking(question))
                        check(question, complete.choices[0].message.content, complete.usage)
                        return
                    chunks = [
                        chunk async for chunk in await client.chat.completions.create(**asking(question), **streaming)
                    ]
                    check(question, joined(chunks), chunks[-1].usage)

                await asyncio.gather(*(one(question, stream) for question in QUESTIONS for stream in (False, True)))

        asyncio.run(at_once())
    kinds = errors(tmp_path)
    say(
        f"{seen['answers']} answers by the openai client, whole and streamed, one by one and 16 at once: text and "
        f"usage ({seen['tokens']} tokens) as generate alone; {len(kinds)} of its typed exceptions: {', '.join(kinds)}"
    )


def errors(folder: Path) -> list[str]:
    """Provoke every error that the client has a class for; return their names."""
    found = []
    engine = Engine(small(), 10**8, waiting=3, store=Store(folder))
    with serving(engine=engine, limits=Limits(answers=2)) as (address, _):

        def client(key: str = KEYS[0], timeout: float = 30) -> Any:
            return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=timeout).chat.completions

        def fails(kind: type[openai.APIError], code: str | None, asks: Any, **change: Any) -> None:
            with pytest.raises(kind) as error:
                asks.create(**{**BODY, **change})
            assert type(error.value) is kind and (code is None or error.value.code == code), error.value
            found.append(kind.__name__)

        fails(openai.AuthenticationError, "invalid_api_key", client("wrong"))
        fails(openai.NotFoundError, "model_not_found", client(), model="gpt-4")
        fails(openai.BadRequestError, "invalid_value", client(), n=2)
        fails(
            openai.BadRequestError,
            "context_length_exceeded",
            client(),
            messages=[{"role": "user", "content": "the " * 700}],
        )
        other = Store(folder).open(f"{sha256(KEYS[0].encode()).hexdigest()[:16]}/taken")
        fails(openai.ConflictError, "session_in_use", client(), extra_body={"kvkeep": {"session": "taken"}})
        other.close()
        with crowded(engine):
            threads = [
                threading.Thread(target=lambda key=key: client(key).create(**BODY))
                for key in (KEYS[0], KEYS[0], KEYS[1])
            ]
            for thread in threads:
                thread.start()
            assert within(10, lambda: engine.waiting == 3)
            fails(openai.RateLimitError, "too_many_answers", client())
            fails(openai.InternalServerError, "overloaded", client(KEYS[1]))
        for thread in threads:
            thread.join(30)
        with held(engine):
            fails(openai.APITimeoutError, None, client(timeout=0.3))
    fails(openai.APIConnectionError, None, client())
    return sorted({*found})


# -- what is wrong ----------------------------------------------------------------------------------------


@pytest.mark.soak(7)
def test_wrong_requests_are_refused_with_their_status_and_field(say: Any) -> None:
    engine = Engine(small(), 10**8, waiting=8)
    seen = Counter[int]()
    with serving(engine=engine, limits=Limits(answers=5)) as (address, _):

        def refused(status: int, found: httpx.Response, code: str | None = None, field: str | None = None) -> None:
            error = found.json()["error"]
            assert found.status_code == status and (code is None or error["code"] == code), found.text[:300]
            assert field is None or (error["param"] or "").startswith(field), (field, error)
            assert "Traceback" not in error["message"] and error["message"].endswith((".", "?"))
            seen[status] += 1

        for key in ("wrong", "first-ke", "first-key2", "FIRST-KEY"):
            refused(401, post(address, BODY, key), "invalid_api_key")
        refused(401, httpx.post(address + CHAT, json=BODY), "invalid_api_key")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        piece = b" " * 10**6
        for length in ({"Content-Length": str(200 * 10**6)}, {}):  # said before, and found out
            refused(413, huge(address, (piece for _ in range(200)), length), "too_large")
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
        assert grown < 40, grown
        for deep in (b"[" * 10**5 + b"]" * 10**5, b'{"messages":' * 10**5 + b"1" + b"}" * 10**5, b"[" * 10**5):
            refused(400, post(address, deep))
        for text in (b"", b"{", b"nope", b'{"a":' + b"1" * 10**6 + b"}", b"\xff\xfe", b'"\\ud800"', b"NaN"):
            refused(400, post(address, text))
        say.progress("200 MB, depth and no JSON refused")
        words = "the " * 1_900_000
        refused(400, post(address, {"model": "tiny", "prompt": words}, path=TEXT), "context_length_exceeded")
        endless = BODY | {"messages": [{"role": "user", "content": words}]}
        refused(400, post(address, endless), "context_length_exceeded")
        fields = 0
        for path, body, field in of_wrong_types():
            refused(400, post(address, body, path=path), None, field)
            fields += 1
        say.progress(f"{fields} fields of wrong types refused")
        busy = Counter(status for _ in range(3) for status in crowd(address, engine))
        seen += Counter({status: count for status, count in busy.items() if status != 200})
        assert busy == {200: 24, 429: 57, 503: 15}, busy
        assert post(address, BODY).status_code == 200 and not engine.waiting and engine.fault is None
    counts = ", ".join(f"{count} × {status}" for status, count in sorted(seen.items()))
    say(
        f"{seen.total()} wrong requests refused ({counts}): keys, 200 MB with and without a length (process "
        f"{grown:+.1f} MB), JSON nested 100,000 deep, a prompt of 1.9 million words, {fields} fields of a wrong type, "
        "a full queue; the server answers after each"
    )


def huge(address: str, pieces: Iterator[bytes], length: dict[str, str]) -> httpx.Response:
    """Send a body of any size; a server that answers before its end may close the connection."""
    headers = bearer() | {"Content-Type": "application/json"} | length
    return httpx.post(address + TEXT, content=pieces, headers=headers, timeout=60)


def crowd(address: str, engine: Engine) -> list[int]:
    """Let 24 clients of one key and then 8 of another ask, while there is no memory; return what they are told."""
    found: list[int] = []

    def clients(key: str, count: int) -> list[threading.Thread]:
        clients = [
            threading.Thread(target=lambda: found.append(post(address, BODY, key).status_code)) for _ in range(count)
        ]
        for thread in clients:
            thread.start()
        return clients

    def come(least: int) -> bool:
        return len(found) + engine.waiting - 5 >= least

    with crowded(engine):
        threads = clients(KEYS[0], 24)
        assert within(25, lambda: len(found) == 19 and engine.waiting == 5)
        for number in range(20, 28):  # three more wait
            threads += clients(KEYS[1], 1)
            assert within(25, partial(come, number))
        assert within(25, lambda: len(found) == 24)
    for thread in threads:
        thread.join(60)
    return found


SAMPLES: list[tuple[str, Any]] = [
    ("boolean", True),
    ("integer", 7),
    ("number", 1.5),
    ("string", "x"),
    ("array", []),
    ("array", [[]]),
    ("object", {}),
    ("object", {"a": {"b": 1}}),
]


def of_wrong_types() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Every field of every request with a value of each type that its schema does not have: path, body, field."""
    text = {"model": "tiny", "prompt": "the river", "max_tokens": 2}
    tokens = {"messages": ASK}
    places: list[tuple[str, type[Any], str, Callable[[dict[str, Any]], dict[str, Any]]]] = [
        (CHAT, ChatRequest, "", lambda given: {**BODY, **given}),
        (TEXT, TextRequest, "", lambda given: {**text, **given}),
        ("/tokenize", TokenizeRequest, "", lambda given: {**tokens, **given}),
        (CHAT, Extension, "kvkeep.", lambda given: {**BODY, "kvkeep": given}),
        (CHAT, StreamOptions, "stream_options.", lambda given: {**BODY, "stream_options": given}),
        (CHAT, Message, "messages.0.", lambda given: {**BODY, "messages": [{**ASK[0], **given}]}),
    ]
    for path, schema, place, body in places:
        for name, about in schema.model_json_schema()["properties"].items():
            allowed = {one.get("type", "object") for one in about.get("anyOf", [about])}
            allowed |= {"integer"} if "number" in allowed else set()
            for kind, value in SAMPLES:
                if kind not in allowed:
                    yield path, body({name: value}), f"{place}{name}"


# -- keys -------------------------------------------------------------------------------------------------


@pytest.mark.soak(8)
def test_sessions_of_one_key_are_invisible_to_others(say: Any, tmp_path: Path) -> None:
    keys = [f"key-{number}" for number in range(20)]
    names, turns = ["talk", "notes"], 3
    engine = Engine(small(), 10**8, store=Store(tmp_path))
    foreign = reused = probes = 0
    with serving(keys, engine=engine) as (address, _):
        texts: dict[tuple[str, str], list[dict[str, str]]] = {}
        for turn in range(turns):
            for name in names:
                for key in keys:  # all of them say the same, under the same name
                    said = texts.setdefault((key, name), [])
                    said.append(ASK[0])
                    own_kind = {"session": name, "method": "h2o", "budget": 24} if not turn else {"session": name}
                    found = post(address, {**BODY, "messages": said, "kvkeep": own_kind}, key).json()
                    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
                    assert (cached == 0) == (turn == 0), (key, name, turn, cached)
                    foreign += cached if turn == 0 else 0
                    reused += cached
                    said.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
            say.progress(f"turn {turn + 1} of {turns}")
        assert len({str(one) for one in texts.values()}) == 1
        extra = post(address, {**BODY, "kvkeep": {"session": "secret"}}, keys[0])
        assert extra.status_code == 200
        for key in keys:
            listed = [one["name"] for one in httpx.get(f"{address}/v1/sessions", headers=bearer(key)).json()["data"]]
            assert sorted(listed) == sorted(names + ["secret"] * (key == keys[0]))
            if key != keys[0]:
                for verb, path in (("GET", ""), ("DELETE", ""), ("GET", "/cache")):
                    probe = httpx.request(verb, f"{address}/v1/sessions/secret{path}", headers=bearer(key))
                    assert probe.status_code == 404, probe.text
                    probes += 1
                again = post(address, {**BODY, "kvkeep": {"session": "secret"}}, key).json()
                assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
                assert httpx.delete(f"{address}/v1/sessions/secret", headers=bearer(key)).status_code == 200
                probes += 1
        assert httpx.get(f"{address}/v1/sessions/secret", headers=bearer(keys[0])).status_code == 200
    folders = [path for path in (tmp_path / "sessions").iterdir() if path.is_dir()]
    assert len(folders) == len(keys) and not any(key in str(path) for key in keys for path in tmp_path.rglob("*"))
    say(
        f"{len(keys)} keys with the same {len(names)} sessions and words, {turns} turns: {foreign} tokens cached of "
        f"another's, {reused:,} of their own; {probes} looks at another's session: 404 or nothing cached"
    )
