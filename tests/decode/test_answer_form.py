"""Forms of answers with calls: a model's answer has only possible calls, and every call is found in its text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import END as EOS
from scripted import byte_level, scripted, sentencepiece

from kvkeep import KeepCache
from kvkeep.decode.answer_form import Answers, Calls
from kvkeep.decode.answer_format import HERMES, AnswerFormat
from kvkeep.decode.answer_reader import AnswerReader, CallPart, MarkedReader
from kvkeep.engine.answer import Answer, Ask, Scheduler
from kvkeep.engine.grammar import Grammar, vocabulary
from kvkeep.engine.sampling import Sampling
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
