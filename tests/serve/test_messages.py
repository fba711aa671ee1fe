"""Anthropic's messages over HTTP, as the anthropic package speaks and types them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter
from running import KEYS, post, serving
from scripted import END as EOS
from scripted import TEMPLATE, byte_level, scripted

from kvkeep.serve.engine import Engine
from kvkeep.serve.http.messages import CountRequest
from kvkeep.serve.http.protocol import ChatPrompt

CACHED = {"type": "ephemeral"}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
TOOLS: Any = [
    {
        "name": "weather",
        "input_schema": SCHEMA | {"additionalProperties": False},
        "cache_control": {"type": "ephemeral"},
    },
    {"name": "time", "description": "now", "input_schema": {"type": "object"}},
]
ASK: Any = [{"role": "user", "content": [{"type": "text", "text": "the Q", "cache_control": CACHED}]}]
PATH = "/v1/messages"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a model that says "So" and calls: where the form leaves it a choice, the tool weather."""
    vocabulary = byte_level("<tool_call>", "</tool_call>", "So\n", "weather", "time")
    script = vocabulary.script(["<|start|>", "So\n", "<tool_call>"], ['"', "weather"], [">", EOS])
    with serving(engine=Engine(scripted(vocabulary, script, TEMPLATE, positions=4096), 10**8)) as (found, _):
        yield found


@pytest.fixture
def client(address: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key=KEYS[0], max_retries=0)


def body(**options: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": ASK, "tools": TOOLS, "max_tokens": 300, "temperature": 0} | options


def said(**options: Any) -> dict[str, Any]:
    """The same for the package, which knows no temperature."""
    given = body(**options)
    return given | {"extra_body": {"temperature": given.pop("temperature")}}


def test_an_answer_calls_and_its_result_can_be_sent(client: anthropic.Anthropic) -> None:
    made = client.messages.create(**said(system=[{"type": "text", "text": "Be brief."}]))
    text, call = made.content
    assert made.stop_reason == "tool_use" and text.type == "text" and text.text == "So" and call.type == "tool_use"
    assert call.name == "weather" and call.input == {"city": "Rome"}
    content: Any = [one.model_dump() for one in made.content]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "20"}]}
    reminder = {"type": "text", "text": "Go on."}
    sent = [*ASK, {"role": "assistant", "content": content}, {"role": "user", "content": [result, reminder]}]
    again = client.messages.create(**said(system=[{"type": "text", "text": "Be brief."}], messages=sent))
    assert again.usage.cache_read_input_tokens and again.usage.input_tokens < made.usage.input_tokens


def test_a_stream_has_the_same_answer(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**said())
    with client.messages.stream(**said()) as stream:
        assert "".join(stream.text_stream) == "So"
        found = stream.get_final_message()
    assert found.stop_reason == whole.stop_reason and found.usage.output_tokens == whole.usage.output_tokens
    for one, other in zip(found.content, whole.content, strict=True):
        assert one.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})


def test_replies_are_of_the_types_of_the_anthropic_package(address: str) -> None:
    whole = Message.model_validate_json(post(address, body(), path=PATH).text, strict=True)
    assert whole.content[-1].type == "tool_use"
    events = post(address, body(stream=True), path=PATH).text.strip().split("\n\n")
    kinds = []
    for one in events:
        name, data = one.split("\n")
        event: Any = TypeAdapter(RawMessageStreamEvent).validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}"
        kinds.append(event.type)
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    counted = post(address, {"model": "tiny", "messages": ASK, "tools": TOOLS}, path=f"{PATH}/count_tokens")
    prompt = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert MessageTokensCount.model_validate_json(counted.text, strict=True).input_tokens == prompt


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    found = client.messages.create(**said(tools=[], stop_sequences=["x", "o"]))
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "o")


@pytest.mark.parametrize(
    "options, name",
    [
        ({"tool_choice": {"type": "any"}}, "weather"),
        ({"tool_choice": {"type": "tool", "name": "time"}}, "time"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "weather"),
        ({"tool_choice": {"type": "none"}}, None),
    ],
)
def test_the_choice_of_a_tool_is_obeyed(client: anthropic.Anthropic, options: Any, name: str | None) -> None:
    calls = [one for one in client.messages.create(**said(**options)).content if one.type == "tool_use"]
    assert [one.name for one in calls[:1]] == [name] * (name is not None)


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_an_answer_obeys_a_schema(address: str, field: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA | {"additionalProperties": False}}
    given = {"format": form, "effort": "low"} if field == "output_config" else form
    found = post(address, body(tools=None, **{field: given}), path=PATH).json()
    assert json.loads(found["content"][0]["text"]) == {"city": "Rome"}


def test_an_answer_that_is_the_last_message_is_continued(address: str) -> None:
    begun = [*ASK, {"role": "assistant", "content": "Yes, "}]
    whole = post(address, {"model": "tiny", "messages": begun}, path=f"{PATH}/count_tokens").json()["input_tokens"]
    asked = post(address, {"model": "tiny", "messages": ASK}, path=f"{PATH}/count_tokens").json()["input_tokens"]
    assert whole == asked + len("Yes, ")


def test_what_claude_code_sends_beside_a_prompt_is_accepted(address: str) -> None:
    given = body(
        thinking={"type": "adaptive"}, context_management={"edits": []}, metadata={"user_id": "a"},
        output_config={"effort": "high"}, max_tokens=32_000,
        messages=[*ASK, {"role": "system", "content": "It is late."}, {"role": "user", "content": "And?"}],
    )  # fmt: skip
    found = httpx.post(f"{address}{PATH}?beta=true", json=given, timeout=60, headers={
        "x-api-key": KEYS[1], "anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27",
    })  # fmt: skip
    assert found.status_code == 200, found.text


def use(number: str, **change: Any) -> dict[str, Any]:
    made = {"type": "tool_use", "id": number, "name": "time", "input": {}} | change
    return {"role": "assistant", "content": [made]}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"max_tokens": None}, "'max_tokens' is required"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "two tools are called 'weather'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'tools.0.type' has to be 'custom'"),
        ({"tool_choice": {"type": "tool", "name": "a"}}, "no tool is called 'a'"),
        ({"tool_choice": {"type": "any"}, "tools": []}, "needs 'tools'"),
        ({"tool_choice": {"type": "tool"}}, "'name' belongs"),
        ({"messages": [*ASK, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "'x'"),
        ({"messages": [*ASK, use("1"), use("1")]}, "two calls have the id '1'"),
        ({"messages": [{"role": "user", "content": use("1")["content"]}]}, "no part of the type 'tool_use'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "'messages.0.content.0' is wrong",
        ),
        ({"messages": [use("1", input=1)]}, "'messages.0.content.0.input' has to be"),
        ({"messages": []}, "needs at least 1"),
        ({"mcp_servers": [{"name": "a"}]}, "'mcp_servers' is not supported"),
    ],
)
def test_what_is_wrong_is_a_sentence(address: str, change: dict[str, Any], words: str) -> None:
    found = post(address, body(**change), path=PATH)
    error = found.json()["error"]
    assert found.status_code == 400 and found.json()["type"] == "error" and words in error["message"], error
    assert error["type"] == "invalid_request_error" and error["message"].endswith(".")


def test_errors_are_those_of_the_anthropic_package(address: str) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=address, api_key="wrong", max_retries=0).messages.create(**said())
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        anthropic.Anthropic(base_url=address, api_key=KEYS[0], max_retries=0).messages.create(**said(model="other"))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: [0-9]+ tokens > 4095 maximum"):
        long: Any = [{"role": "user", "content": "the Q " * 4000}]
        anthropic.Anthropic(base_url=address, api_key=KEYS[0], max_retries=0).messages.create(**said(messages=long))


@pytest.mark.parametrize(
    ("given", "thinks", "effort"),
    [
        ({}, None, None),
        ({"thinking": {"type": "adaptive"}}, None, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, "medium"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, True, "high"),
        ({"output_config": {"effort": "low"}}, True, "low"),
    ],
)
def test_thinking_and_effort_reach_the_template(given: dict[str, Any], thinks: bool | None, effort: str | None) -> None:
    prompt = CountRequest.model_validate({"model": "tiny", "messages": ASK, **given}).given()
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.variables.get("enable_thinking"), prompt.variables.get("reasoning_effort")) == (thinks, effort)
