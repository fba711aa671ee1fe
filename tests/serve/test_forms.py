"""Answers with a form, as clients ask for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running import CHAT, KEYS, TEXT, post, serving
from scripted import CONTENTS, END, byte_level, scripted

from kvkeep.serve.engine import Engine

ASK: Any = [{"role": "user", "content": "the Q"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    vocabulary = byte_level(" def", "yes")
    model = scripted(vocabulary, vocabulary.script(["Q", " def", "yes", END]), CONTENTS)
    with serving(engine=Engine(model, 10**8)) as (found, _):
        yield found


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_obeys_the_schema_of_its_request(address: str, seed: int) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEYS[0], max_retries=0)
    asked: Any = {"model": "tiny", "messages": ASK, "max_tokens": 200, "seed": seed, "response_format": FORMAT}
    whole = client.chat.completions.create(**asked).choices[0]
    pieces = client.chat.completions.create(**asked, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in pieces) == whole.message.content
    assert whole.finish_reason == "stop" and type(json.loads(whole.message.content or "")["a"]) is int


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({"kvkeep": {"regex": "yes+( yes)?"}}, "yes+( yes)?"),
        ({"kvkeep": {"grammar": 'start: "no" | "nein"'}}, "no|nein"),
        ({}, " defyes"),
    ],
)
def test_a_form_of_kvkeep_works_for_conversations_and_texts(address: str, options: dict[str, Any], wanted: str) -> None:
    given = {"model": "tiny", "max_tokens": 100, "temperature": 0} | options
    said = post(address, given | {"messages": ASK}).json()["choices"][0]
    continued = post(address, given | {"prompt": "the Q"}, path=TEXT).json()["choices"][0]
    assert re.fullmatch(wanted, said["message"]["content"]) and said["message"]["content"] == continued["text"]


def test_json_without_a_schema_is_an_object(address: str) -> None:
    given = {"model": "tiny", "messages": ASK, "max_tokens": 60, "response_format": {"type": "json_object"}, "seed": 3}
    assert post(address, given).json()["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    "change, field, words",
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "'json_schema' belongs to"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object' or 'json_schema'"),
        ({"response_format": FORMAT | {"x": 1}}, "response_format.x", "not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "foo"}}}},
         "response_format", "foo"),
        ({"response_format": FORMAT, "kvkeep": {"regex": "a"}}, "response_format", "leave one"),
        ({"kvkeep": {"regex": "("}}, "kvkeep.regex", "unclosed group"),
        ({"kvkeep": {"grammar": "start: nothing"}}, "kvkeep.grammar", "nothing"),
        ({"kvkeep": {"regex": "a", "grammar": 'start: "a"'}}, "kvkeep.grammar", "leave one"),
        ({"kvkeep": {"regex": "a" * 200_000}}, "kvkeep.regex", "at most"),
    ],
)  # fmt: skip
def test_a_wrong_form_is_a_sentence_that_names_its_field(
    address: str, change: dict[str, Any], field: str, words: str
) -> None:
    found = post(address, {"model": "tiny", "messages": ASK, "max_tokens": 4} | change, path=CHAT)
    error = found.json()["error"]
    assert found.status_code == 400 and error["param"] == field and words in error["message"], error
    assert error["message"].endswith(".") and "\n" not in error["message"]
