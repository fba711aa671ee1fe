"""OpenAI's responses over HTTP, as the openai package speaks and types them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from running import KEYS, bearer, post, serving
from scripted import END as EOS
from scripted import TEMPLATE, byte_level, scripted

from kvkeep.blocks.store import Store
from kvkeep.models.fingerprint import fingerprint_of_tokenizer
from kvkeep.serve.engine import Engine

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"],
          "additionalProperties": False}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False},
    {"type": "namespace", "name": "clock", "description": "", "tools": [{"type": "function", "name": "time"}]},
    {"type": "custom", "name": "patch", "format": {"type": "text"}},
    {"type": "web_search", "filters": {}},
]
PATH = "/v1/responses"


def script() -> Any:
    """A model that says "So" and calls: where the form leaves it a choice, the tool weather."""
    vocabulary = byte_level("<tool_call>", "</tool_call>", "So\n", "weather", "time")
    return scripted(vocabulary, vocabulary.script(["<|start|>", "So\n", "<tool_call>"], ['"', "weather"], [">", EOS]),
                    TEMPLATE, positions=4096)  # fmt: skip


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(engine=Engine(script(), 10**8)) as (found, _):
        yield found


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEYS[0], max_retries=0)


def body(**options: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "the Q", "tools": TOOLS, "max_output_tokens": 300, "temperature": 0} | options


def test_an_answer_calls_and_its_result_can_be_sent(client: openai.OpenAI) -> None:
    made = client.responses.create(**body(instructions="Be brief.", store=False))
    text, call = made.output
    assert made.status == "completed" and made.output_text == "So" and text.type == "message"
    assert call.type == "function_call" and call.name == "weather" and json.loads(call.arguments) == {"city": "Rome"}
    sent = [{"role": "user", "content": [{"type": "input_text", "text": "the Q"}]}, *(
        one.model_dump() for one in made.output
    ), {"type": "function_call_output", "call_id": call.call_id, "output": "20"}]  # fmt: skip
    again = client.responses.create(**body(instructions="Be brief.", input=sent))
    assert again.usage and again.usage.input_tokens_details.cached_tokens > 100


def test_an_earlier_response_is_continued(client: openai.OpenAI) -> None:
    short: Any = body(tools=[], max_output_tokens=4)
    first = client.responses.create(**short)
    second = client.responses.create(**short | {"input": "And?", "previous_response_id": first.id})
    third = client.responses.create(**short | {"input": "Well?", "previous_response_id": second.id})
    assert first.usage and second.usage and third.usage
    known = first.usage.total_tokens
    assert second.usage.input_tokens > known and third.usage.input_tokens > second.usage.total_tokens
    assert client.responses.retrieve(second.id).output == second.output
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.create(**body(input="Hm?", previous_response_id=third.id))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_within_a_call_is_incomplete(address: str, stream: bool) -> None:
    cut = body(tool_choice="required", max_output_tokens=30)
    found = post(address, cut | {"stream": stream}, path=PATH)
    assert found.status_code == 200
    made = json.loads(found.text.strip().rpartition("data: ")[2])["response"] if stream else found.json()
    (call,) = made["output"]
    assert made["status"] == "incomplete" and call["arguments"].startswith("{") and call["status"] == "incomplete"
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "20"}
    assert post(address, body(input=[output], previous_response_id=made["id"]), path=PATH).status_code == 200


def test_responses_are_continued_after_a_restart_and_by_their_owner_only(tmp_path: Path) -> None:
    with serving(engine=Engine(script(), 10**8, store=Store(tmp_path / "store"))) as (address, _):
        first = post(address, body(), path=PATH).json()
    with serving(engine=Engine(script(), 10**8, store=Store(tmp_path / "store"))) as (address, _):
        output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "20"}
        more = body(input=[output], previous_response_id=first["id"])
        assert post(address, more, key=KEYS[1], path=PATH).status_code == 404
        assert post(address, more, path=PATH).json()["usage"]["input_tokens"] > first["usage"]["total_tokens"]
        assert httpx.get(f"{address}{PATH}/{first['id']}", headers=bearer()).json()["output"] == first["output"]
        assert post(address, body(store=False), path=PATH).json()["id"] != first["id"]


def test_a_record_that_is_no_response_is_not_continued(address: str) -> None:
    model = script()
    made = post(address, body(), path=PATH).json()
    number = f"{fingerprint_of_tokenizer(model.tokenizer)} {made['output'][1]['call_id']}"
    reply = post(address, body(previous_response_id=number), path=PATH)
    assert reply.status_code == 404 and "no response" in reply.text


def test_responses_of_more_messages_than_a_request_may_have_are_not_continued(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short: Any = body(tools=[], max_output_tokens=1)
    first = post(address, short, path=PATH).json()["id"]
    monkeypatch.setattr("kvkeep.serve.http.responses.MAX_MESSAGES", 2)
    second = post(address, short | {"previous_response_id": first}, path=PATH)
    assert second.status_code == 200
    third = post(address, short | {"previous_response_id": second.json()["id"]}, path=PATH)
    assert third.status_code == 400 and "more than 2 messages" in third.text


def test_a_stream_has_the_same_answer(client: openai.OpenAI) -> None:
    whole = client.responses.create(**body())
    found = None
    for event in client.responses.create(**body(stream=True)):
        if event.type == "response.completed":
            found = event.response
    assert found is not None and found.output_text == whole.output_text == "So"
    one, other = found.output[1], whole.output[1]
    assert one.type == other.type == "function_call" and one.arguments == other.arguments


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", ["weather", "patch", None])
def test_replies_are_of_the_types_of_the_openai_package(address: str, name: str | None) -> None:
    kind = "custom" if name == "patch" else "function"
    asked = body(tool_choice="none" if name is None else {"type": kind, "name": name})
    whole = Response.model_validate_json(post(address, asked, path=PATH).text, strict=True)
    events = list[Any]()
    for one in post(address, asked | {"stream": True}, path=PATH).text.strip().split("\n\n"):
        head, data = one.split("\n")
        events.append(TypeAdapter(ResponseStreamEvent).validate_json(data.removeprefix("data: "), strict=True))
        assert head == f"event: {events[-1].type}" and events[-1].sequence_number == len(events) - 1
    kinds = [one.type for one in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}" and kinds.count("response.output_item.done") == len(whole.output)
    called = {"weather": "function_call", "patch": "custom_tool_call", None: "message"}[name]
    assert whole.output[0].type == called


def test_a_function_of_a_namespace_is_named_as_it_was_given(address: str) -> None:
    tools = [TOOLS[1] | {"tools": [{"type": "function", "name": "time", "parameters": SCHEMA}]}]
    (call,) = post(address, body(tools=tools, tool_choice="required"), path=PATH).json()["output"][:1]
    assert (call["name"], call["namespace"]) == ("time", "clock")


def test_an_answer_obeys_a_schema(address: str) -> None:
    form = {"type": "json_schema", "name": "it", "schema": SCHEMA}
    found = post(address, body(tools=[], text={"format": form, "verbosity": "low"}), path=PATH).json()
    assert json.loads(found["output"][0]["content"][0]["text"]) == {"city": "Rome"}


def test_what_codex_sends_beside_a_prompt_is_accepted_and_tools_left_out_are_named(address: str) -> None:
    found = post(address, body(
        store=False, include=["reasoning.encrypted_content"], reasoning={"effort": "low", "summary": "auto"},
        prompt_cache_key="a", client_metadata={"x": "y"}, tool_choice="auto", parallel_tool_calls=False,
        instructions="Be brief.", input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Think."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the Q"}], "id": "msg_1"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"},
        ],
    ), path=PATH)  # fmt: skip
    assert found.status_code == 200, found.text
    assert (
        found.json()["kvkeep"]["notes"][-1]
        == "Tools of these types are left out, because this server cannot run them: web_search."
    )


def call(number: str, **change: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": number, "name": "weather", "arguments": "{}"} | change


@pytest.mark.parametrize(
    "change, field, words",
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "two tools are called 'weather'"),
        ({"tools": [{"type": "moon"}]}, "tools.0", "not supported; send functions"),
        ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice", "no tool is called 'a'"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "needs 'tools'"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input", "'x'"),
        ({"input": [call("1"), call("1")]}, "input", "two calls have the id '1'"),
        ({"input": [call("1", arguments="{a")]}, "input.0.arguments", "is not JSON"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "not supported; send"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "has to be"),
        ({"input": []}, "input", "no messages"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "no response 'resp_x'"),
        ({"conversation": "a"}, "conversation", "not supported"),
        ({"background": True}, "background", "not supported"),
    ],
)
def test_what_is_wrong_is_a_sentence(address: str, change: dict[str, Any], field: str, words: str) -> None:
    found = post(address, body(**change), path=PATH)
    error = found.json()["error"]
    assert found.status_code in (400, 404) and error["param"] == field and words in error["message"], error
    assert error["message"].endswith(".") and "\n" not in error["message"]
