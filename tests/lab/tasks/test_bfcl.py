"""BFCL: prompts whose tools are read before the question, and the scores of scripted calls, by a small checker."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from answer_formats import TEMPLATES
from kvkeep_lab.reading import copied
from kvkeep_lab.subject import ReadText, Subject
from kvkeep_lab.tasks.bfcl import FAMILIES, Bfcl, calls_in, checker, is_right, judged, tool
from measuring import subject
from scripted import END, byte_level, scripted

from kvkeep.decode.answer_format import HERMES
from kvkeep.decode.answer_reader import MarkedReader
from kvkeep.decode.prompt import prompt_text
from kvkeep.engine import answer
from kvkeep.engine.batch import forward
from kvkeep.errors import UsageError

pytest.importorskip("llguidance")
MARKS = "<tool_call>", "</tool_call>"
CHECKER = """
from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING

def ast_checker(functions, calls, right, language, family, model):
    assert not MODEL_CONFIG_MAPPING[model].underscore_to_dot and language == "python" and functions
    return {"valid": len(calls) == len(right) and all(
        value in right[place][name][key]
        for place, call in enumerate(calls) for name, given in call.items() for key, value in given.items()
    )}
"""
MODULES = {
    "__init__.py": "",
    "constants/type_mappings.py": 'GORILLA_TO_OPENAPI = {"dict": "object", "string": "string", "float": "number"}',
    "constants/enums.py": "class Language:\n    PYTHON = 'python'",
    "constants/model_config.py": "raise ImportError('the clients of all models')",
    "eval_checker/ast_eval/ast_checker.py": CHECKER,
}


def function(name: str, *cities: str) -> dict[str, Any]:
    city = {"type": "string", "enum": list(cities)} if cities else {"type": "float"}
    parameters = {"type": "dict", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    return {"name": name, "description": "of a city", "parameters": parameters}


WEATHER = function("weather", "Rome")
ROWS = [
    {"id": f"q{number}", "question": [[{"role": "user", "content": f"Question {number}?"}]], "function": [one]}
    for number, one in enumerate([WEATHER, function("time"), WEATHER, function("weather", "Oslo"), function("hour")])
]
RIGHT = [{"id": row["id"], "ground_truth": [{row["function"][0]["name"]: {"city": ["Rome"]}}]} for row in ROWS]  # type: ignore[index]


def forget() -> None:
    checker.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "bfcl_eval"]:
        del sys.modules[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of bfcl-eval's shape, whose checker compares arguments, and whose clients cannot be imported."""
    data = tmp_path / "bfcl_eval" / "data"
    files = {tmp_path / "bfcl_eval" / name: text for name, text in MODULES.items()}
    for family in FAMILIES:
        files[data / f"BFCL_v4_{family}.json"] = "\n".join(map(json.dumps, ROWS))
        files[data / "possible_answer" / f"BFCL_v4_{family}.json"] = "\n".join(map(json.dumps, RIGHT))
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield
    forget()


def calling(method: str = "full", budget: str | None = None) -> Subject:
    """A model that begins a call and then repeats the mark; where a grammar decides, it calls."""
    vocabulary = byte_level(*MARKS, "So\n")
    script = vocabulary.script(["\n", "So\n", MARKS[0]], [">", END])
    return Subject(scripted(vocabulary, script, TEMPLATES["hermes"], positions=4096), method, budget)


def samples(one: Subject, family: str = "simple_python", seed: int = 0, **sizes: Any) -> tuple[Bfcl, Any]:
    task = Bfcl(family=[family], **sizes)
    return task, task.prepare(one.tokenizer, task.sources(None), {"family": family}, seed)


def read(text: str, *names: str) -> Any:
    return calls_in(MarkedReader(HERMES, {name: {} for name in names or ("weather", "time")}), text)


def written(name: str, arguments: str) -> str:
    return f'{MARKS[0]}\n{{"name": "{name}", "arguments": {arguments}}}\n{MARKS[1]}'


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("method", "budget"), [("full", None), ("kv-direct", "25%"), ("prompt-newest", "60%")])
def test_a_model_that_only_begins_a_call_calls_with_the_grammar(method: str, budget: str | None) -> None:
    one = calling(method, budget)
    task, (sample,) = samples(one, samples=1, seed=random.Random(0).sample(range(5), 5).index(0), new=300)
    outcome = task.measure(one, sample)
    assert outcome.scores == {
        "right": 0.0, "valid": 0.0, "wrong_arguments": 0.0,
        "right_grammar": 1.0, "valid_grammar": 1.0, "wrong_arguments_grammar": 0.0,
    }  # fmt: skip
    prompt = len(sample.facts["text"].ids) + len(sample.ids)
    assert outcome.cost.prompt_tokens == prompt
    assert outcome.cost.entries == (None if budget is None else int(prompt * float(budget[:-1]) / 100))


@pytest.mark.usefixtures("package")
def test_the_tools_are_read_before_the_question() -> None:
    one = calling()
    _, found = samples(one, samples=2, group=2)
    text = found[0].facts["text"]
    assert found[1].facts["text"] is text and text.context == max(len(text.ids) + len(it.ids) for it in found)
    for sample in found:
        (row,) = (row for row in ROWS if row["function"] == [*sample.facts["functions"]] and asks(one, sample, row))
        described = [tool(function) for name, function in functions(found).items() if name]
        prompt = prompt_text(one.tokenizer, row["question"][0], tools=described)  # type: ignore[index]
        assert prompt.ids(one.tokenizer) == [*text.ids, *sample.ids]
    assert "Question" not in one.tokenizer.decode(text.ids) and '"object"' in one.tokenizer.decode(text.ids)


def asks(one: Subject, sample: Any, row: Any) -> bool:
    return one.tokenizer.decode(sample.ids).startswith(row["question"][0][0]["content"])


def functions(found: Any) -> dict[str, Any]:
    return {function["name"]: function for sample in found for function in sample.facts["functions"]}


@pytest.mark.usefixtures("package")
def test_a_prompt_never_describes_two_tools_of_one_name() -> None:
    one = calling()
    _, pairs = samples(one, samples=4, group=2)
    for first, second in zip(pairs[::2], pairs[1::2], strict=True):
        assert first.facts["text"] is second.facts["text"]
        assert len({json.dumps(it) for it in functions([first, second]).values()}) == len(first.facts["calls"].tools)
    with pytest.raises(UsageError, match="has 4 questions, and seed 1 needs 8"):
        samples(one, samples=4, group=2, seed=1)


@pytest.mark.usefixtures("package")
def test_seeds_take_different_questions_and_the_same_ones_again() -> None:
    one = calling()
    asked = [[tuple(it.ids) for it in samples(one, samples=1, seed=seed)[1]] for seed in (0, 1, 2, 3, 4, 0)]
    assert asked[0] == asked[5] and len({one for found in asked for one in found}) == 5


def test_calls_are_those_that_are_complete() -> None:
    call = written("weather", '{"city": "Rome"}')
    assert read(f"So\n{call}\n{written('time', '{}')}") == [("weather", {"city": "Rome"}), ("time", {})]
    assert read("No.") == [] == read(written("unknown", "{}"))
    assert read(call[:-14]) is None is read(written("weather", '{"city": Rome}'))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([("weather", {"city": "Rome"})], (1.0, 1.0, 0.0)),
        ([("weather", {"city": "Oslo"})], (0.0, 1.0, 1.0)),
        ([("weather", {"town": "Rome"})], (0.0, 1.0, 1.0)),  # the checker fails on it
        ([("time", {"city": "Rome"})], (0.0, 1.0, 0.0)),
        ([("weather", {"city": "Rome"})] * 2, (0.0, 1.0, 0.0)),
        ([], (0.0, 0.0, 0.0)),
        (None, (0.0, 0.0, 0.0)),
    ],
)
def test_a_call_is_right_or_of_the_right_tool_or_neither(calls: Any, expected: tuple[float, ...]) -> None:
    facts = {"family": "simple_python", "functions": [WEATHER], "right": RIGHT[0]["ground_truth"]}
    assert tuple(judged(facts, calls).values()) == expected
    assert judged({"family": "irrelevance"}, calls) == {"right": float(not calls)}


@pytest.mark.parametrize(
    ("method", "budget"),
    [("full", None), ("stock", None), ("kv-direct", "16"), ("snapkv", "50%"), ("kvzip+quantize:4", "75%")],
)
def test_an_answer_after_a_text_is_that_of_the_question_by_itself(method: str, budget: str | None) -> None:
    """Whatever is asked beside it, also with one pass a token; without eviction it is that of the whole prompt."""
    one, text = subject(method, budget, "qwen2"), [(11 * number + 5) % 97 for number in range(150)]
    asked = [[17, 4], [3, 30, 6, 1], [4]]
    read = ReadText(tuple(text), 170)
    found = one.write_after(read, asked, 6)
    assert [it.tokens for it in found] == [one.write_after(read, [ids], 6)[0].tokens for ids in asked]
    apart = [one._written(copied(one._after(read, ids).cache), ids, 6).tokens for ids in asked]
    assert [it.tokens for it in found] == apart
    assert [it.cost.prompt_tokens for it in found] == [152, 154, 151]
    if method in ("full", "stock", "kv-direct"):
        assert [it.tokens for it in found] == [one.write([*text, *ids], 6).tokens for ids in asked]


@pytest.mark.usefixtures("package")
def test_questions_about_the_same_tools_share_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    one, passes = calling("kvzip", "80%"), list[int]()
    task, found = samples(one, samples=4, group=2, new=12)
    apart = [task.measure(one, sample).scores for sample in found]
    monkeypatch.setattr(answer, "forward", lambda model, reads: passes.append(len(reads)) or forward(model, reads))
    outcomes = [*task.outcomes(one, found)]
    assert [it.scores for it in outcomes] == apart and max(passes) == 2
    assert [it.cost.prompt_tokens for it in outcomes] == [len(it.facts["text"].ids) + len(it.ids) for it in found]


def first(given: dict[str, list[Any]]) -> dict[str, Any]:
    """The first possible value of each argument; "" stands for none."""
    values = {key: found[0] for key, found in given.items() if found[0] != ""}
    return {key: first(value) if isinstance(value, dict) else value for key, value in values.items()}


@pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed")
@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "irrelevance"])
def test_its_own_answers_are_right(family: str) -> None:
    """By BFCL's checker, on its data. The same arguments of another tool are not."""
    forget()
    _, found = samples(calling(), family, samples=20)
    for sample in found:
        calls = [(name, first(given)) for one in sample.facts["right"] for name, given in one.items()]
        assert is_right(sample.facts, calls), calls
        assert not is_right(sample.facts, [(f"{name}s", given) for name, given in calls])
