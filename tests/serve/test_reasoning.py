"""Reasoning over HTTP: it is a field of messages and deltas, and comes back; forms apply after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from answer_formats import TEMPLATES
from running import KEYS, post, serving
from scripted import END as EOS
from scripted import byte_level, scripted

from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine

ASK: Any = [{"role": "user", "content": "the Q"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
SCHEMA |= {"additionalProperties": False}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
OPENED = TEMPLATES["qwen3"].replace(
    "{{ '<|start|>assistant\n' }}", "{{ '<|start|>assistant' }}{{ '<think>' if enable_thinking is not false }}"
)
PIECES = ("<think>", "</think>", "So.", "Yes!")


def model(template: str, *answer: str) -> Loaded:
    """A model whose answers follow the last token of a prompt: the byte of ">" or "t"."""
    vocabulary = byte_level(*PIECES)
    script = vocabulary.script([">", *answer, EOS]) | {vocabulary.id("t"): vocabulary.id(answer[0])}
    return scripted(vocabulary, script, template, positions=4096)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a model that thinks "So." and says "Yes!". Its prompts begin the reasoning unless it is off."""
    with serving(engine=Engine(model(OPENED, "So.", "</think>", "Yes!"), 10**8)) as (found, _):
        yield found


def body(**options: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": ASK, "max_tokens": 300, "temperature": 0} | options


def message(address: str, **options: Any) -> dict[str, Any]:
    found = post(address, body(**options))
    assert found.status_code == 200, found.text
    return dict(found.json()["choices"][0]["message"])


def test_reasoning_is_a_field_of_the_message_and_of_deltas(address: str) -> None:
    assert message(address) == {"role": "assistant", "content": "Yes!", "reasoning_content": "So."}
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEYS[0], max_retries=0)
    content = reasoning = ""
    for chunk in client.chat.completions.create(**body(stream=True)):
        content += chunk.choices[0].delta.content or ""
        reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert (content, reasoning) == ("Yes!", "So.")


def test_the_usage_counts_the_tokens_of_the_reasoning(address: str) -> None:
    usage = post(address, body()).json()["usage"]  # "So.", its mark, "Yes!" and the end
    assert (usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]) == (4, 2)
    asked = {"model": "tiny", "input": ASK[0]["content"], "temperature": 0}
    for stream in (False, True):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEYS[0], max_retries=0)
        found: Any = client.responses.create(**asked, stream=stream)
        usage = [*found][-1].response.usage if stream else found.usage
        assert usage.output_tokens_details.reasoning_tokens == 2


def test_forms_apply_after_the_reasoning(address: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    for options in ({"response_format": form}, {"kvkeep": {"regex": '\\{"city": ?"Rome"\\}'}}):
        found = message(address, **options)
        assert found["reasoning_content"] == "So." and json.loads(found["content"]) == {"city": "Rome"}
    found = message(address, tools=TOOLS, tool_choice="required")
    (call,) = found["tool_calls"][:1]
    assert found["reasoning_content"] == "So." and json.loads(call["function"]["arguments"]) == {"city": "Rome"}


def test_reasoning_comes_back_and_can_be_switched_off(address: str) -> None:
    def tokens(**options: Any) -> int:
        return int(post(address, body(max_tokens=1, **options)).json()["usage"]["prompt_tokens"])

    def talk(**fields: str) -> list[Any]:
        return [*ASK, {"role": "assistant", "content": "Yes!", **fields}, *ASK]

    assert (
        tokens(messages=talk(reasoning_content="So."))
        > tokens(messages=talk(reasoning_content=""))
        == tokens(messages=talk())
    )
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert tokens(**off) < tokens() == tokens(reasoning_effort="low")
    for change, field in (
        ({"messages": [ASK[0] | {"reasoning_content": "So."}]}, "messages.0"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"reasoning_effort": "a"}, "reasoning_effort"),
    ):
        error = post(address, body(**change))
        assert error.status_code == 400 and error.json()["error"]["param"] == field, error.text


def test_marks_that_are_special_tokens_are_read_and_not_shown() -> None:
    vocabulary = byte_level(*PIECES)
    script = vocabulary.script(["t", "So.", "Yes!", EOS])
    loaded = scripted(vocabulary, script, TEMPLATES["mistral with marks"].replace("assistant\n' }}", "assistant' }}"))
    loaded.tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    loaded.model.resize_token_embeddings(len(loaded.tokenizer), mean_resizing=False)
    loaded.model.lm_head.weight.data[len(vocabulary.tokens) :] = 0
    with serving(engine=Engine(loaded, 10**8)) as (address, _):
        found = message(address, tools=TOOLS, tool_choice="required", max_tokens=100)
        assert found["content"] is None and found["tool_calls"][0]["function"]["name"] == "weather"
        assert json.loads(found["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
        assert message(address)["content"] == "So.Yes!"
