"""Formats are found by what templates write, and each accepts, and reads back, exactly what its template writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from answer_formats import GRANITE, HARMONY, TEMPLATES, with_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import TEMPLATE, byte_level

from kvkeep.decode.answer_form import Answers, Calls
from kvkeep.decode.answer_reader import CallPart, Reasoning
from kvkeep.decode.prompt import prompt_text
from kvkeep.decode.recognition import answer_format
from kvkeep.engine.grammar import Grammar, vocabulary

pytest.importorskip("llguidance")
SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
        "unit": {"enum": ["C", "F", 1, None]},
        "deep": {"anyOf": [{"$ref": "#/$defs/deep"}, {"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
    "$defs": {"deep": {"type": "object", "properties": {"x": {"type": "array"}}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "weather_now", "description": "", "parameters": {"type": "object"}}},
]
ALL = {**TEMPLATES, "harmony": HARMONY, "granite 3": GRANITE}
ASK = {"role": "user", "content": "Is it warm?"}
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Co"], include_characters="\n")).filter(
    lambda text: "<" not in text and "[" not in text and text.strip() == text
)
ARGUMENTS = st.fixed_dictionaries(
    {"city": TEXT},
    optional={
        "days": st.integers(-(2**53), 2**53),
        "unit": st.sampled_from(["C", "F", 1, None]),
        "deep": st.none() | st.fixed_dictionaries({"x": st.lists(st.booleans() | st.integers(0, 9), max_size=3)}),
    },
)
_TOKENIZERS: dict[tuple[str, bool], Any] = {}


def tokenizer_of(name: str, tokens: bool) -> Any:
    if (name, tokens) not in _TOKENIZERS:
        made = byte_level().tokenizer(ALL[name])
        made = with_tokens(made) if tokens else made
        _TOKENIZERS[name, tokens] = made, vocabulary(made, len(made), (made.eos_token_id,))
    return _TOKENIZERS[name, tokens]


def answered(name: str, tokens: bool, calls: list[Any], reasoning: str = "", content: str = "") -> tuple[Any, str]:
    """The format of a template, and the text of an answer with these calls in it, without the end of its message."""
    tokenizer, _ = tokenizer_of(name, tokens)
    made = [
        {"id": f"number{at:03}", "type": "function", "function": {"name": tool, "arguments": arguments}}
        for at, (tool, arguments) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": made}
    results = [{"role": "tool", "content": "20", "tool_call_id": one["id"]} for one in made]
    before = prompt_text(tokenizer, [ASK], tools=TOOLS).text
    text = prompt_text(tokenizer, [ASK, answer, *results], tools=TOOLS).text
    opened = before.endswith("<think>\n") and text.startswith(before)
    before = before if opened else before.removesuffix("<think>\n")
    assert text.startswith(before)
    answers = Answers(answer_format(tokenizer), tokenizer, opened)
    return answers, text[len(before) :].partition("<|call|>" if name == "harmony" else "<|turn|>")[0]


def read(reader: Any, text: str, size: int) -> tuple[str, str, list[tuple[str, str]]]:
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    parts = [one for start in range(0, len(text), size) for one in reader.add(text[start : start + size])]
    for part in [*parts, *reader.rest()]:
        if isinstance(part, Reasoning):
            reasoning += part.text
        elif isinstance(part, CallPart):
            calls += [(part.name, "")] if part.name else []
            calls[-1] = calls[-1][0], calls[-1][1] + part.arguments
        else:
            content += part
    return content, reasoning, calls


def accepted(answers: Answers, calls: Calls, known: Any, text: str) -> str:
    """What remains of a text after the tokens that a form accepts; a dot if the answer could not end there."""
    matcher = Grammar(known, answers.form(calls, known))._matcher.deep_copy()
    ids = answers.tokenizer(text, add_special_tokens=False).input_ids
    count = matcher.validate_tokens(ids)
    matcher.consume_tokens(ids[:count])
    return str(answers.tokenizer.decode(ids[count:])) + ("" if matcher.is_accepting() else ".")


@pytest.mark.turns(2)
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=2), size=st.integers(1, 9), required=st.booleans())
def test_a_form_accepts_what_its_template_writes(
    name: str, tokens: bool, calls: list[Any], size: int, required: bool
) -> None:
    several = name not in ("llama", "harmony")
    calls = [{key: one[key] for key in SCHEMA["properties"] if key in one} for one in calls]  # forms keep the order
    made = [("weather", one) for one in calls] if several else [("weather", calls[0])]
    made += [("weather_now", {})] if several else []
    reasoning = "" if name == "hermes" else "So:\nno."
    answers, text = answered(name, tokens, made, reasoning)
    assert not answers.format.plain
    _, known = tokenizer_of(name, tokens)
    possible = Calls([(one["function"]["name"], one["function"]["parameters"]) for one in TOOLS], required)  # type: ignore[index, misc]
    assert accepted(answers, possible, known, text) == ""
    reader = answers.reader(possible)
    content, thought, found = read(reader, text, size)
    assert [(tool, json.loads(given)) for tool, given in found] == made and not content.strip()
    assert reader.complete == len(made) and thought == (reasoning if answers.format.reasoning_key else "")


@pytest.mark.parametrize("name", ALL)
def test_a_call_of_an_unknown_tool_or_with_wrong_arguments_is_refused(name: str) -> None:
    answers, text = answered(name, True, [("weather", {"city": "Rome", "days": 3})])
    _, known = tokenizer_of(name, True)
    tools = [("weather", SCHEMA)]
    assert accepted(answers, Calls(tools, True), known, text) == ""
    assert accepted(answers, Calls([("time", SCHEMA)], True), known, text)
    wrong = {**SCHEMA, "properties": {**SCHEMA["properties"], "days": {"type": "boolean"}}}
    assert accepted(answers, Calls([("weather", wrong)], True), known, text)
    needed = {**SCHEMA, "required": ["city", "unit"]}
    assert accepted(answers, Calls([("weather", needed)], True), known, text)


def test_a_template_without_tools_gets_the_plain_format() -> None:
    found = answer_format(byte_level().tokenizer(TEMPLATE))
    assert found.plain and not found.describes and found.takes_system and found.reasoning is None
    assert answer_format(byte_level().tokenizer(None)).plain


def test_marks_are_tokens_where_the_vocabulary_has_them() -> None:
    answers, text = answered("mistral with marks", True, [("weather", {"city": "Rome"})])
    names = {answers.tokenizer.convert_ids_to_tokens(one) for one in answers.named(Calls([("weather", SCHEMA)]))}
    assert names == {"[TOOL_CALLS]", "[ARGS]"} and not answers.named(Calls())
    _, known = tokenizer_of("mistral with marks", True)
    spelt = text.replace("[ARGS]", "[AR GS]")
    assert accepted(answers, Calls([("weather", SCHEMA)], True), known, spelt)
