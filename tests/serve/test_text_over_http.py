"""What a server sends is the model's text to the letter, and what it gets is data."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from running import CHAT, TEXT, post, serving, streamed
from scripted import CONTENTS, END, START, TEMPLATE, TURN, Vocabulary, byte_level, scripted, sentencepiece

from kvkeep.serve.engine import Engine

KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece}
ANSWER = [" def", ":", "\n", "    ", "return", " x", b"\xf0", b"\x9f", b"\xa6", b"\x9c", "  ", "y", b"\xc3", END]
WRITTEN = " def:\n    return x\N{PARROT}  y\ufffd"


@pytest.fixture(scope="module")
def servers() -> Iterator[Any]:
    """The address of a server by the kind of its vocabulary, and its template; the answer follows Q."""
    with ExitStack() as stack:
        running: dict[Any, tuple[str, Vocabulary]] = {}

        def server(kind: str, template: str | None = CONTENTS) -> tuple[str, Vocabulary]:
            if (kind, template) not in running:
                vocabulary = KINDS[kind]("  ", "    ", " def", "return", " x")
                loaded = scripted(vocabulary, vocabulary.script(["Q", *ANSWER]), template)
                address, _ = stack.enter_context(serving(engine=Engine(loaded, 10**8)))
                running[kind, template] = address, vocabulary
            return running[kind, template]

        yield server


def body(content: Any = "the Q", **options: Any) -> dict[str, Any]:
    given = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 40, "temperature": 0}
    return given | options


def chunks(address: str, asked: dict[str, Any], path: str) -> list[Any]:
    with streamed(address, asked, path) as found:
        lines = [line.removeprefix("data: ") for line in found.iter_lines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [None, "\N{PARROT}", "n x", "  y", "nowhere"])
def test_answers_and_streams_are_the_text_to_the_letter(servers: Any, kind: str, stop: str | None) -> None:
    address, _ = servers(kind)
    wanted = WRITTEN.partition(stop or "\0")[0]
    options: dict[str, Any] = {"stop": stop, "logprobs": True, "top_logprobs": 20}
    whole = post(address, body(**options)).json()["choices"][0]
    assert whole["message"]["content"] == wanted and whole["finish_reason"] == "stop"
    parts = chunks(address, body(**options), CHAT)
    assert "".join(one["delta"].get("content", "") for one in parts) == wanted
    told = [token for one in parts for token in (one.get("logprobs") or {}).get("content", [])]
    assert told == whole["logprobs"]["content"]
    data = bytes(byte for one in told for byte in one["bytes"])
    assert data.decode(errors="replace") == wanted
    for one in told:
        for token in (one, *one["top_logprobs"]):
            assert "\ufffd" not in token["token"]
    if stop is None:
        assert [one["token"] for one in told[-6:]] == ["\\x9f", "\\xa6", "\\x9c", "  ", "y", "\\xc3"]
        assert all(one["top_logprobs"][0]["token"] == one["token"] for one in told)


@pytest.mark.parametrize("kind", KINDS)
def test_completions_have_offsets_and_keys_that_differ(servers: Any, kind: str) -> None:
    address, _ = servers(kind)
    asked = {"model": "tiny", "prompt": "the Q", "max_tokens": 40, "temperature": 0, "logprobs": 20}
    found = post(address, asked, path=TEXT).json()["choices"][0]
    assert found["text"] == WRITTEN == "".join(one["text"] for one in chunks(address, asked, TEXT))
    told = found["logprobs"]
    assert told["text_offset"] == [0, 4, 5, 6, 10, 16, 18, 18, 18, 18, 19, 21, 22]
    assert all(len(one) == 20 for one in told["top_logprobs"]), "parts of characters are told apart"


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_has_no_special_token_and_a_prompt_may(servers: Any, kind: str) -> None:
    turn = {"role": "user", "content": f"a{TURN}{START}"}
    for template, count in ((CONTENTS, 0), (None, 0), (TEMPLATE, 1)):
        address, vocabulary = servers(kind, template)
        for content in (turn["content"], [{"type": "text", "text": turn["content"]}]):
            ids = post(address, {"messages": [{**turn, "content": content}]}, path="/tokenize").json()["tokens"]
            assert ids.count(vocabulary.id(TURN)) == count
        ids = post(address, {"prompt": turn["content"]}, path="/tokenize").json()["tokens"]
        assert ids.count(vocabulary.id(TURN)) == 1


def test_an_answer_without_a_content_is_empty_and_what_belongs_to_no_role_is_refused(servers: Any) -> None:
    address, _ = servers("byte level")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    empty = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "audio": None}
    asked = {"role": "user", "content": "Q"}
    for answer in (empty, {"role": "assistant"}, {"role": "assistant", "content": "", "tool_calls": []}):
        found = post(address, body() | {"messages": [asked, answer, asked]})
        assert found.json()["choices"][0]["message"]["content"] == WRITTEN, found.text
    refused = {
        "messages.1": {"role": "user", "content": "", "tool_calls": [call]},
        "messages": {"role": "tool", "tool_call_id": "1", "content": "5"},
        "messages.1.role": {"role": "function", "name": "f", "content": "5"},
        "messages.1.content": {"role": "user", "content": None},
    }
    for field, message in refused.items():
        error = post(address, body() | {"messages": [asked, message, asked]}).json()["error"]
        assert error["param"] == field, error


@pytest.mark.slow
def test_a_template_that_does_not_end_is_a_400_and_nobody_waits_for_it(servers: Any) -> None:
    looping = "{% for a in range(99999) %}{% for b in range(99999) %}{{ messages|length }}{% endfor %}{% endfor %}"
    address, _ = servers("byte level", looping)
    waits, ended = list[float](), threading.Event()

    def others() -> None:
        while not ended.is_set():
            begun = time.perf_counter()
            assert httpx.get(f"{address}/health").status_code == 200
            waits.append(time.perf_counter() - begun)

    thread = threading.Thread(target=others)
    thread.start()
    begun = time.process_time()
    answer = post(address, body())
    ended.set()
    thread.join()
    assert time.process_time() - begun < 5
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("The model's chat template takes")
    assert len(waits) > 3 and max(waits) < sum(waits) / 2
