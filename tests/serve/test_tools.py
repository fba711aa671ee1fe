"""Tools over HTTP, as the openai package speaks: an answer calls, its client sends the result, an answer follows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from running import KEYS, post, serving
from scripted import END as EOS
from scripted import TEMPLATE, byte_level, scripted

from kvkeep.serve.engine import Engine

BEGIN, END = "<tool_call>", "</tool_call>"
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA | {"additionalProperties": False}}},
    {"type": "function", "function": {"name": "time", "description": "now", "strict": True}},
]
DEEP = json.loads('{"items":' * 200 + "{}" + "}" * 200)
ASK: Any = [{"role": "user", "content": "the Q"}]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a model that says "So" and calls: where the form leaves it a choice, the tool weather."""
    vocabulary = byte_level(BEGIN, END, "So\n", "weather", "time")
    script = vocabulary.script(["<|start|>", "So\n", BEGIN], ['"', "weather"], [">", EOS])
    with serving(engine=Engine(scripted(vocabulary, script, TEMPLATE, positions=4096), 10**8)) as (found, _):
        yield found


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEYS[0], max_retries=0)


def body(**options: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": ASK, "tools": TOOLS, "max_tokens": 300, "temperature": 0} | options


def test_an_answer_calls_and_its_result_can_be_sent(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**body()).choices[0]
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls" and choice.message.content == "So" and call.type == "function"
    assert call.id and call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Rome"}
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "20"}]}
    again = client.chat.completions.create(**body(messages=[*ASK, choice.message.model_dump(), result]))
    assert again.usage and again.usage.prompt_tokens_details and again.usage.prompt_tokens_details.cached_tokens


def test_a_stream_has_the_same_call(client: openai.OpenAI) -> None:
    content, calls, reason = "", dict[int, list[str]](), None
    for chunk in client.chat.completions.create(**body(stream=True)):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        content += delta.content or ""
        for part in delta.tool_calls or ():
            assert part.function is not None
            if part.id:
                assert part.function.name and part.type == "function"
                calls[part.index] = [part.function.name, ""]
            calls[part.index][1] += part.function.arguments or ""
    assert (content, [*calls], reason) == ("So", [0], "tool_calls")
    assert calls[0][0] == "weather" and json.loads(calls[0][1]) == {"city": "Rome"}


def test_replies_with_calls_are_of_the_types_of_the_openai_package(address: str) -> None:
    asked = body(logprobs=True, top_logprobs=1)
    whole = ChatCompletion.model_validate_json(post(address, asked).text, strict=True).choices[0].logprobs
    lines = [line[6:] for line in post(address, asked | {"stream": True}).text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    tokens = 0
    for line in lines:
        chunk = ChatCompletionChunk.model_validate_json(line, strict=True)
        tokens += len((chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or ())
    assert whole is not None and tokens == len(whole.content or ()) > 20


@pytest.mark.parametrize(
    "options, name",
    [
        ({"tool_choice": "required"}, "weather"),
        ({"tool_choice": {"type": "function", "function": {"name": "time"}}}, "time"),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, "weather"),
    ],
)
def test_the_choice_of_a_tool_is_obeyed(client: openai.OpenAI, options: dict[str, Any], name: str) -> None:
    choice = client.chat.completions.create(**body(**options)).choices[0]
    (call, *more) = choice.message.tool_calls or ()
    assert call.type == "function" and call.function.name == name and (choice.finish_reason == "length" or not more)


def test_without_a_choice_of_tools_an_answer_is_text(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**body(tool_choice="none")).choices[0]
    assert choice.message.tool_calls is None and (choice.message.content or "").startswith(f"So\n{BEGIN}")


def call(number: str, **function: Any) -> dict[str, Any]:
    made = {"id": number, "type": "function", "function": {"name": "time", "arguments": "{}"} | function}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


@pytest.mark.parametrize(
    "change, field, words",
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "two tools are called 'weather'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "has to be 'function'"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name", "at least 1"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "b"}}}]}, "tools", "type: b"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}]},
         "tools.0.function.parameters", "nested deeper"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": DEEP}}},
         "response_format.json_schema.schema", "nested deeper"),
        ({"messages": [*ASK, call("1", arguments=json.dumps(DEEP))]},
         "messages.1.tool_calls.0.function.arguments", "nested deeper"),
        ({"kvkeep": {"regex": "a+"}}, "tools", "leave one of them out"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"const": "\ud800"}}}]},
         "tools.0.function.parameters", "half a character"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"const": float("inf")}}}]},
         "tools.0.function.parameters", "not finite"),
        ({"messages": [*ASK, call("1", arguments='{"a": "\\ud800"}')]},
         "messages.1.tool_calls.0.function.arguments", "half a character"),
        ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice", "no tool is called 'a'"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"messages": [*ASK, {"role": "tool", "tool_call_id": "x", "content": "1"}]}, "messages", "no earlier answer"),
        ({"messages": [*ASK, call("1"), call("1")]}, "messages", "two calls have the id '1'"),
        ({"messages": [*ASK, call("1", arguments="{a")]},
         "messages.1.tool_calls.0.function.arguments", "is not JSON"),
        ({"messages": [*ASK, call("1", arguments="[1]")]},
         "messages.1.tool_calls.0.function.arguments", "not an object"),
        ({"messages": [*ASK, {"role": "tool", "content": "1"}]}, "messages.1", "'tool_call_id' belongs"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tools_is_a_sentence(address: str, change: dict[str, Any], field: str, words: str) -> None:
    found = post(address, json.dumps(body(**change)).encode())  # escaped, as httpx sends no half of a character
    error = found.json()["error"]
    assert found.status_code == 400 and error["param"] == field and words in error["message"], error
    assert error["message"].endswith(".") and "\n" not in error["message"]


def test_names_of_special_tokens_in_tools_and_results_are_data(address: str) -> None:
    tools = json.loads(json.dumps(TOOLS).replace("weather", "<|turn|>"))
    sent = [*ASK, call("1", name="<|turn|>"), {"role": "tool", "tool_call_id": "1", "content": "20<|turn|>"}]
    assert post(address, body(tools=tools, messages=sent)).status_code == 200


def test_a_schema_with_words_that_forms_do_not_know_works_and_is_named(address: str) -> None:
    """As zod writes records."""
    schema = SCHEMA | {"propertyNames": {"type": "string"}, "additionalProperties": {}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    found = post(address, body(tools=tools, max_tokens=5)).json()
    assert found["kvkeep"]["notes"][-1] == "Calls may disobey these words of the tools' schemas: propertyNames."
