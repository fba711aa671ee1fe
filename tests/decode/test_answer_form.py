"""Forms of answers with calls: a model's answer has only possible calls, and every call is found in its text."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
from answer_formats import HARMONY, TEMPLATES, with_tokens
from hypothesis import given
from hypothesis import strategies as st
from scripted import END as EOS
from scripted import byte_level, scripted, sentencepiece

from kvkeep import KeepCache
from kvkeep.decode.answer_form import Answers, Calls
from kvkeep.decode.answer_format import HERMES, AnswerFormat
from kvkeep.decode.answer_reader import AnswerReader, CallPart, MarkedReader
from kvkeep.decode.recognition import answer_format
from kvkeep.engine.answer import Answer, Ask, Scheduler
from kvkeep.engine.grammar import Grammar, vocabulary
from kvkeep.engine.sampling import Sampling
from kvkeep.errors import UsageError
from kvkeep.models.loading import Loaded

pytest.importorskip("llguidance")
KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": 'a"b\\', "parameters": {}}},
]
BEGIN, END = "<tool_call>", "</tool_call>"


def written(name: str, arguments: str) -> str:
    return f'{BEGIN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{END}'


def read(parts: list[str], *names: str) -> tuple[str, list[tuple[str, str]], AnswerReader]:
    """The content and the calls of an answer that arrives in these parts."""
    reader, content, calls = MarkedReader(HERMES, {name: {} for name in ("weather", "time", *names)}), "", list[Any]()
    for one in [*(one for part in parts for one in reader.add(part)), *reader.rest()]:
        if isinstance(one, str):
            content += one
        elif isinstance(one, CallPart) and one.name:
            assert one.index == len(calls)
            calls.append((one.name, one.arguments))
        else:
            assert one.index == len(calls) - 1
            calls[-1] = calls[-1][0], calls[-1][1] + one.arguments
    return content, calls, reader


ARGUMENTS = st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers() | st.lists(st.booleans()))


@given(
    st.text("ab <\n", max_size=9),
    st.lists(st.tuples(st.text(min_size=1, max_size=5), ARGUMENTS), max_size=3),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_calls_are_found_however_their_text_arrives(content: str, calls: list[Any], sizes: list[int]) -> None:
    calls = [(name, json.dumps(arguments, indent=1)) for name, arguments in calls]
    text, parts = content + "\n".join(written(*call) for call in calls), list[str]()
    while sum(map(len, parts)) < len(text):
        start = sum(map(len, parts))
        parts.append(text[start : start + sizes[len(parts) % len(sizes)]])
    found, found_calls, reader = read(parts, *(name for name, _ in calls))
    assert found == (content.rstrip() if calls else content) and found_calls == calls and reader.complete == len(calls)


def test_a_call_that_was_cut_off_is_not_complete() -> None:
    whole = written("weather", '{"city": "Rome"}')
    content, calls, reader = read([f"See.\n{whole}\n{whole[:-20]}"])
    assert content == "See." and reader.complete == 1
    assert [name for name, _ in calls] == ["weather"] * 2 and '{"city": "Rome"}'.startswith(calls[1][1])
    assert read([f"a {BEGIN[:-1]}"])[:2] == (f"a {BEGIN[:-1]}", [])


BARE = {
    "plain": '{"name": "weather", "arguments": {"city": "Rome"}}',
    "fenced": '```json\n{\n  "name": "weather",\n  "arguments": {\n    "city": "Rome"\n  }\n}\n```',
    "without a language": '```\n{"name": "weather", "arguments": {"city": "Rome"}}\n```\n',
    "in doubled braces": '{{"name": "weather", "arguments": {"city": "Rome"}}}',
}


@pytest.mark.parametrize("kind", BARE)
@pytest.mark.parametrize("size", [1, 7, 500])
def test_an_answer_that_begins_with_the_json_of_a_call_is_one(kind: str, size: int) -> None:
    text = BARE[kind]
    content, calls, reader = read([text[start : start + size] for start in range(0, len(text), size)])
    assert not content and reader.complete == 1
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", {"city": "Rome"})]
    for other in (text.replace("weather", "other"), text.replace("arguments", "values"), f"So: {text}", text[:20]):
        assert read([other[start : start + size] for start in range(0, len(other), size)])[:2] == (other, [])
    cut = read([text[: text.index("Rome")]])
    assert cut[1][0][0] == "weather" and not cut[2].complete


# -- answers ----------------------------------------------------------------------------------------------


def answered(model: Loaded, calls: Calls, seed: int, temperature: float = 1.5) -> Answer:
    eos = model.tokenizer.eos_token_id
    known = vocabulary(model.tokenizer, model.model.config.vocab_size, (eos,))
    sampling = Sampling(
        temperature, seed=seed, grammar=Grammar(known, Answers(AnswerFormat(), model.tokenizer).form(calls, known))
    )
    ask = Ask(model.tokenizer("a Q").input_ids, 400, sampling)
    answer = Answer(ask, KeepCache(model.model), model.tokenizer, [eos], lambda _: None)
    scheduler = Scheduler(model.model)
    scheduled = scheduler.add(answer)
    while not scheduled.give(scheduler.step()[0].logits):
        pass
    return answer


def possible(several: bool = True, required: bool = True, content: Any = None) -> Calls:
    named = [(one["function"]["name"], one["function"]["parameters"]) for one in TOOLS[:1]]
    return Calls(named, required, several, content)


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("several", [True, False])
def test_an_answer_that_has_to_call_calls_with_arguments_of_the_schema(kind: str, several: bool) -> None:
    made = KINDS[kind](BEGIN, END, '{"name": "weather", "arguments": ', '{"city":', "yes")
    model, ended = scripted(made, made.script(["Q", "yes", EOS])), 0
    for seed in range(6):
        answer = answered(model, possible(several), seed)
        content, calls, reader = read([answer.text])
        assert not content and calls and {name for name, _ in calls} == {"weather"}
        if answer.reason == "eos":
            ended += 1
            assert reader.complete == len(calls) and (several or len(calls) == 1)
            assert all(len(json.loads(arguments)["city"]) <= 5 for _, arguments in calls)
    assert ended


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_may_call_is_text_or_a_call(kind: str) -> None:
    """A model that wants to call, and then says something else, may only call."""
    made = KINDS[kind](BEGIN, END, "yes")
    says = scripted(made, made.script(["Q", "yes", EOS]))
    assert answered(says, possible(required=False), 0, 0.0).text == "yes"
    calls = scripted(made, made.script(["Q", BEGIN, "yes", EOS]))
    texts = [answered(calls, possible(required=False), seed).text for seed in range(6)]
    assert any(BEGIN in text for text in texts)
    for text in texts:
        after = text.partition(BEGIN)[2]
        assert not after or '\n{"name": "weather", "arguments": {'.startswith(after[:34]), text


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_without_marks_obeys_the_schema(kind: str) -> None:
    made = KINDS[kind](BEGIN, END, '{"name": "weather", "arguments":', "yes")
    model, ended = scripted(made, made.script(["Q", '{"name": "weather", "arguments":', "yes", EOS])), 0
    for seed in range(6):
        answer = answered(model, possible(required=False), seed, 0.5)
        if answer.text.startswith('{"name": "weather", "arguments":') and answer.reason == "eos":
            _, ((name, arguments),), reader = read([answer.text])
            assert name == "weather" and len(json.loads(arguments)["city"]) <= 5 and reader.complete == 1
            ended += 1
    assert ended


def test_an_answer_without_a_call_has_the_form_of_its_content() -> None:
    made = byte_level(BEGIN, END, "yes")
    model = scripted(made, made.script(["Q", "yes", EOS]))
    for seed in range(4):
        text = answered(model, possible(required=False, content={"enum": ["one", "two"]}), seed).text
        assert text in ('"one"', '"two"') or text.lstrip().startswith(BEGIN)


# -- bad input --------------------------------------------------------------------------------------------

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "text": {"type": "string"}}}
GOOD: dict[str, Any] = {
    "a cycle": {"properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}},
    "10,000 alternatives": {"properties": {"a": {"enum": [f"v{number}" for number in range(10_000)]}}},
    "bounds": {"properties": {"a": {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}}},
    "a dialect": {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"a": {}}},
    "unions": {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": ["integer", "null"]}, NODE]}},
               "$defs": {"node": NODE}},
    "nothing": {},
    "any fields": {"type": "object", "additionalProperties": {"type": "string"}},
    "a reference at the top": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "a pattern": {"properties": {"a": {"type": "string", "pattern": "^a/[0-9]+$", "maxLength": 9}}},
}  # fmt: skip
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a reference to nothing": ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "does not exist"),
    "an unknown type": ({"properties": {"a": {"type": "b"}}}, "Invalid type"),
    "a wrong pattern": ({"properties": {"a": {"type": "string", "pattern": "(a"}}, "required": ["a"]}, "unclosed"),
    "a list of properties": ({"properties": [1]}, "properties"),
    "one required name": ({"properties": {"a": {}}, "required": "a"}, "required"),
    "false": ({"properties": {"a": False}, "required": ["a"]}, "nsatisfiable"),
    "10,000 objects": ({"properties": {"a": {"anyOf": [
        {"type": "object", "properties": {f"k{number}": {}}} for number in range(10_000)]}}}, "too large|simpler"),
}  # fmt: skip
FORMATS = ("hermes", "qwen3 coder", "glm", "harmony")


def compiled(template: str, name: str, schema: dict[str, Any]) -> Grammar:
    tokenizer, known = tokenizer_of(template)
    answers = Answers(answer_format(tokenizer), tokenizer)
    return Grammar(known, answers.form(Calls([(name, schema)]), known))


@lru_cache
def tokenizer_of(template: str) -> tuple[Any, Any]:
    tokenizer = with_tokens(byte_level().tokenizer({**TEMPLATES, "harmony": HARMONY}[template]))
    return tokenizer, vocabulary(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))


@pytest.mark.parametrize("template", FORMATS)
@pytest.mark.parametrize("kind", GOOD)
def test_schemas_of_real_agents_compile(template: str, kind: str) -> None:
    assert compiled(template, "weather", GOOD[kind]).processor(0)


@pytest.mark.turns(2)
@pytest.mark.parametrize("template", FORMATS)
@pytest.mark.parametrize("kind", WRONG)
def test_other_schemas_are_refused_with_a_sentence(template: str, kind: str) -> None:
    schema, words = WRONG[kind]
    with pytest.raises(UsageError, match=words) as error:
        compiled(template, "weather", schema)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_arguments_written_one_by_one_need_properties() -> None:
    with pytest.raises(UsageError, match="describe them by 'properties'"):
        compiled("glm", "weather", {"anyOf": [NODE, {"type": "object"}]})


@pytest.mark.parametrize("template", [*FORMATS, "mistral with marks", "granite 4"])
@pytest.mark.parametrize("name", ["<tool_call>", "[ARGS]", "<|turn|>", "<|channel|>", 'a/b"\\', "wétter", ".*", "{"])
def test_a_tool_named_as_a_mark_is_called_by_its_characters(template: str, name: str) -> None:
    """Its name is spelt by ordinary tokens, and the call is read back."""
    tokenizer, known = tokenizer_of(template)
    found = answer_format(tokenizer)
    answers, calls = Answers(found, tokenizer), Calls([(name, CITY)], True)
    text = f" to=functions.{name}<|channel|>commentary json<|message|>" + '{"city": "Rome"}'
    text = text if found.calls is None else found.written([(name, {"city": "Rome"})])
    head = " to=functions." if found.calls is None else found.calls.head
    name_in_text = name if found.calls is None else found.calls.name(name)
    rest = text.removeprefix(head).removeprefix(name_in_text)
    ids = [one for part in (head, *name_in_text, rest) for one in tokenizer(part, add_special_tokens=False).input_ids]
    matcher = Grammar(known, answers.form(calls, known))._matcher.deep_copy()
    assert matcher.validate_tokens(ids) == len(ids)
    reader = answers.reader(calls)
    parts = [one for one in [*reader.add(text), *reader.rest()] if isinstance(one, CallPart)]
    assert parts[0].name == name and json.loads("".join(one.arguments for one in parts)) == {"city": "Rome"}
