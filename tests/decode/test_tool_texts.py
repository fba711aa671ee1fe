"""Prompts with tools: as the template takes them, or as texts where it takes none."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from answer_formats import GRANITE, HARMONY, TEMPLATES
from scripted import TEMPLATE, byte_level

from kvkeep.decode.answer_format import AnswerFormat
from kvkeep.decode.prompt import prompt_text
from kvkeep.decode.tool_texts import with_tools

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": 'a"b\\', "parameters": {}}},
]
CALL = {"id": "number001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
OTHER = CALL | {"id": "number002"}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Is it warm?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, OTHER]},
    {"role": "tool", "content": "20", "tool_call_id": "number001"},
    {"role": "tool", "content": "21", "tool_call_id": "number002"},
    {"role": "user", "content": "Sure?"},
]
WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NO_SYSTEM = TEMPLATE.replace("{{ '", "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ '", 1)


def test_a_template_that_knows_calls_describes_the_tools() -> None:
    text = prompt_text(byte_level().tokenizer(TEMPLATES["hermes"]), TALK, tools=TOOLS).text
    assert text.startswith(json.dumps(TOOLS[0])) and text.count(WRITTEN) == 2 and "# Tools" not in text


def test_a_template_that_knows_no_tools_gets_messages_of_texts() -> None:
    tokenizer = byte_level().tokenizer(TEMPLATE)
    text = prompt_text(tokenizer, TALK, tools=TOOLS).text
    assert text.startswith("<|start|>system\nBe short.\n\n# Tools") and json.dumps(TOOLS[0]) in text
    assert f"<|start|>assistant\nLet me see.\n{WRITTEN}\n{WRITTEN}<|turn|>" in text
    results = "\n".join(f"<tool_response>\n{one}\n</tool_response>" for one in (20, 21))
    assert f"<|start|>user\n{results}<|turn|>" in text and text.endswith("Sure?<|turn|><|start|>")
    found, tools = with_tools(TALK[1:2], TOOLS, AnswerFormat())
    assert [one["role"] for one in found] == ["system", "user"] and not tools
    assert with_tools(TALK[:2], (), AnswerFormat()) == (TALK[:2], ())


def test_without_a_place_for_a_system_prompt_the_first_question_has_the_description() -> None:
    tokenizer = byte_level().tokenizer(NO_SYSTEM)
    text = prompt_text(tokenizer, TALK[1:2], tools=TOOLS).text
    assert text.startswith("<|start|>user\n# Tools") and text.endswith("\n\nIs it warm?<|turn|><|start|>")


def test_a_template_that_fails_on_tools_gets_them_described_in_its_own_format() -> None:
    template = TEMPLATES["mistral with marks"].replace("{{ tool | tojson }}", "{{ tool.function.parameters.properties.city.type + '' }}{{ tool | tojson }}")  # fmt: skip # noqa: E501
    known = [{"type": "function", "function": {"name": "now", "description": "", "parameters": {}}}]
    text = prompt_text(byte_level().tokenizer(template), TALK[:3], tools=known).text
    assert text.startswith("<|start|>system\nBe short.\n\n# Tools") and json.dumps(known[0]) in text


def test_a_template_that_tells_how_to_call_gets_calls_as_texts_of_its_format() -> None:
    text = prompt_text(byte_level().tokenizer(GRANITE), TALK, tools=TOOLS).text
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    assert f"assistant\nLet me see.\n<|tool_call|>[{call}, {call}]<|turn|><|start|>tool\n20" in text


def test_reasoning_goes_to_templates_that_write_it() -> None:
    thought = [TALK[1], {"role": "assistant", "content": "Yes.", "reasoning_content": "Sun."}, TALK[5]]
    texts = {name: prompt_text(byte_level().tokenizer(one), thought).text for name, one in TEMPLATES.items()}
    assert "<think>\nSun.\n</think>\n\nYes." in texts["qwen3"] and "Sun." not in texts["hermes"]
    assert "analysis<|message|>Sun.<|end|>" in prompt_text(byte_level().tokenizer(HARMONY), thought).text


def test_variables_reach_the_template() -> None:
    template = "{{ 'no thought: ' if enable_thinking is false }}" + TEMPLATE
    tokenizer = byte_level().tokenizer(template)
    assert prompt_text(tokenizer, TALK[1:2], variables={"enable_thinking": False}).text.startswith("no thought: ")
    assert prompt_text(tokenizer, TALK[1:2]).text.startswith("<|start|>")


@pytest.mark.parametrize("template", [TEMPLATES["hermes"], TEMPLATES["deepseek r1"], TEMPLATES["glm"], TEMPLATE])
def test_names_of_special_tokens_are_data_wherever_they_are(template: str) -> None:
    vocabulary = byte_level()
    tokenizer = vocabulary.tokenizer(template)
    talk, tools = json.loads(json.dumps([TALK, TOOLS]).replace("weather", "<|turn|>").replace("Rome", "<|start|>"))
    talk[3]["content"] = "20<|turn|>"
    text = prompt_text(tokenizer, talk, tools=tools)
    ids = text.ids(tokenizer)
    messages = len(re.findall(r"<\|start\|>(?:system|user|assistant|tool)\n", text.text))
    last = text.text.endswith("<|start|>")
    assert ids.count(vocabulary.id("<|turn|>")) == messages - (not last)
    assert ids.count(vocabulary.id("<|start|>")) == messages + last
