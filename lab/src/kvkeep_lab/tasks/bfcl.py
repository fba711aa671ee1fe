"""BFCL: calls of tools, by the data and the checker of the Berkeley Function Calling Leaderboard (package bfcl-eval).

Its checker imports the clients of all models that the leaderboard knows, of which it asks one thing: whether a model's
names have ``_`` in place of dots. A module in the place of these clients answers that, so bfcl-eval needs none of its
dependencies.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvkeep.decode.answer_form import Calls, answers_to
from kvkeep.decode.answer_reader import AnswerReader, CallPart
from kvkeep.decode.prompt import prompt_text
from kvkeep.engine.answer import end_ids
from kvkeep.engine.forms import llguidance
from kvkeep.engine.grammar import Grammar, vocabulary
from kvkeep.engine.pieces import pieces_of
from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep_lab.cell import Point
from kvkeep_lab.subject import ReadText, Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome, among
from kvkeep_lab.tasks.rows import rows
from kvkeep_lab.tasks.texts import read_once

FAMILIES = ("simple_python", "multiple", "parallel", "live_simple", "live_multiple", "irrelevance")
_MODEL = "kvkeep"
_CLIENTS = "bfcl_eval.constants.model_config"
_OTHER_QUESTIONS = ("A", "0")
"""Two questions that no third one begins like."""

Row = Mapping[str, Any]
Call = tuple[str, dict[str, Any]]
"""The name of a tool, and its arguments."""


class Bfcl(Task):
    """Questions that a call of a tool answers, or none."""

    name = "bfcl"
    about = "BFCL: calls of tools, whose descriptions are read before the question"
    protocol = (
        "BFCL v4's questions and tools in the model's chat template, without BFCL's own instructions. Instructions and "
        "tools are read in chunks within the budget, then the question is read by the same cache, so the method does "
        "not know it when it first evicts entries. A budget in percent is a share of the prompt, question included. "
        "The answer is greedy, without a grammar and with the one by which the server lets answers have calls; the "
        "server's reader finds the calls. Right: by BFCL's checker; in irrelevance, an answer without a call. Valid: "
        "complete calls of tools that there are, whose arguments are a JSON object. Wrong arguments: the calls are of "
        "the right tools, and not right. irrelevance has only right calls. In a group, the prompt of each question "
        "describes the tools of all, and they are read once. A seed takes other questions of a fixed, mixed order."
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("right", "right calls"),
        Metric("valid", "valid calls"),
        Metric("wrong_arguments", "right tool, wrong arguments", "lower"),
        Metric("right_grammar", "right calls, grammar"),
        Metric("valid_grammar", "valid calls, grammar"),
        Metric("wrong_arguments_grammar", "right tool, wrong arguments, grammar", "lower"),
    )
    relative = tuple(metric.name for metric in metrics)
    axes = ("family",)
    packages: ClassVar[dict[str, str]] = {"bfcl_eval": "bfcl-eval"}
    install = "pip install --no-deps bfcl-eval"

    family: list[Annotated[str, among("family of BFCL", FAMILIES)]] = Field(
        list(FAMILIES), min_length=1, description=", ".join(FAMILIES)
    )
    new: int = Field(256, ge=1, description="the most tokens written")
    group: int = Field(1, ge=1, description="questions whose tools one prompt describes")
    samples: int = Field(25, ge=1, description="questions; another seed takes the next ones")

    def sources(self, data: Path | None) -> list[Path]:
        """Return the files of the package, which has its data. Raises UsageError without llguidance."""
        llguidance()
        return [path for family in self.family for path in _files(family)]

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Return the questions of a family in a fixed, mixed order, from question ``seed`` · samples on."""
        family, numbers = str(point["family"]), range(seed * self.samples, (seed + 1) * self.samples)
        found, *answers = (rows(path, "id") for path in _files(family))
        right = {row["id"]: row["ground_truth"] for one in answers for row in one}
        groups = _groups(random.Random(0).sample(found, len(found)), self.group)
        if (count := len(groups) * self.group) < numbers.stop:
            raise UsageError(f"BFCL's {family} has {count} questions, and seed {seed} needs {numbers.stop}.")
        made = {
            number: _samples(tokenizer, family, groups[number], right)
            for number in range(numbers[0] // self.group, numbers[-1] // self.group + 1)
        }
        return [made[number // self.group][number % self.group] for number in numbers]

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        return next(self.outcomes(subject, [sample]))

    def outcomes(self, subject: Subject, samples: Sequence[Sample]) -> Iterator[TaskOutcome]:
        """Measure ``samples``; the answers about a text share their passes."""
        for text, group in groupby(samples, lambda sample: sample.facts["text"]):
            yield from self._about(subject, text, [*group])

    def _about(self, subject: Subject, text: ReadText, samples: Sequence[Sample]) -> Iterator[TaskOutcome]:
        """Measure ``samples`` about one ``text``, which have the same tools."""
        calls, questions = samples[0].facts["calls"], [sample.ids for sample in samples]
        model, tokenizer = subject.loaded.model, subject.tokenizer
        size, ends = ModelGeometry.from_config(model.config).vocab_size, end_ids(model)
        known, answers = vocabulary(tokenizer, size, ends), answers_to(tokenizer, [*text.ids, *questions[0]])
        grammar = Grammar(known, answers.form(calls, known))

        def scores(sample: Sample, tokens: Sequence[int]) -> dict[str, float]:
            pieces = pieces_of(tokenizer, [*text.ids, *sample.ids], named=answers.named(calls))
            said = pieces.add([token for token in tokens if token not in ends]) + pieces.rest()
            return judged(sample.facts, calls_in(answers.reader(calls), said))

        free = subject.write_after(text, questions, self.new)
        # The others have the likeliest tokens that the grammar allows.
        outside = [n for n, answer in enumerate(free) if not grammar.processor(0).follow(answer.tokens)]
        inside = dict(enumerate(free))
        if outside:
            again = subject.write_after(text, [questions[n] for n in outside], self.new, grammar)
            inside |= zip(outside, again, strict=True)
        for number, (sample, answer) in enumerate(zip(samples, free, strict=True)):
            with_grammar = scores(sample, inside[number].tokens)
            found = scores(sample, answer.tokens) | {f"{name}_grammar": one for name, one in with_grammar.items()}
            yield TaskOutcome(found, answer.cost)


def _groups(found: Sequence[Row], size: int) -> list[list[Row]]:
    """Return groups of ``size`` rows that one prompt can describe: with the same messages before the question, and no
    name of two tools. A row goes to the first group that has a place for it."""
    groups = list[list[Row]]()
    for row in found:
        for group in groups:
            if len(group) < size and all(_fits(row, other) for other in group):
                group.append(row)
                break
        else:
            groups.append([row])
    return [group for group in groups if len(group) == size]


def _fits(one: Row, other: Row) -> bool:
    tools = {function["name"]: function for function in one["function"]}
    same = all(tools.get(function["name"], function) == function for function in other["function"])
    return same and one["question"][0][:-1] == other["question"][0][:-1]


def _samples(tokenizer: Any, family: str, group: Sequence[Row], right: Mapping[str, Any]) -> list[Sample]:
    """Return the samples of a group's questions. The tools of all are described in one text."""
    described = {function["name"]: tool(function) for row in group for function in row["function"]}
    before, tools = group[0]["question"][0][:-1], list(described.values())

    def encoded(question: str, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return prompt_text(tokenizer, [*before, {"role": "user", "content": question}], tools=tools).ids(tokenizer)

    prompts = [encoded(row["question"][0][-1]["content"], tools) for row in group]
    one, other = (encoded(question, tools) for question in _OTHER_QUESTIONS)
    opening = encoded(_OTHER_QUESTIONS[1], [])
    text, (_, *questions) = read_once([one, *prompts], other, opening, max(map(len, prompts)))
    calls = Calls([(name, one["function"]["parameters"]) for name, one in described.items()])
    return [
        Sample(
            ids,
            {
                "text": text,
                "family": family,
                "calls": calls,
                "functions": row["function"],
                "right": right.get(row["id"]),
            },
        )
        for row, ids in zip(group, questions, strict=True)
    ]


def tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function of BFCL as OpenAI describes tools: with the types of JSON Schema."""
    return {"type": "function", "function": {**function, "parameters": _schema(function["parameters"])}}


def _schema(given: Any) -> Any:
    if isinstance(given, list):
        return [_schema(one) for one in given]
    if not isinstance(given, Mapping):
        return given
    types = import_module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI
    return {
        name: types.get(one, one) if name == "type" and isinstance(one, str) else _schema(one)
        for name, one in given.items()
    }


def calls_in(reader: AnswerReader, text: str) -> list[Call] | None:
    """Return the calls in an answer; None: one of them is not complete, or its arguments are no JSON object."""
    found = list[list[str]]()
    for part in [*reader.add(text), *reader.rest()]:
        if isinstance(part, CallPart):
            found += [[part.name, ""]] if part.name else []
            found[-1][1] += part.arguments
    try:
        calls = [(name, json.loads(arguments)) for name, arguments in found]
    except ValueError:
        return None
    complete = reader.complete == len(calls) and all(isinstance(arguments, dict) for _, arguments in calls)
    return calls if complete else None


def judged(facts: Mapping[str, Any], calls: Sequence[Call] | None) -> dict[str, float]:
    """Return the scores of the calls in an answer. facts: those of its sample."""
    if facts["family"] == "irrelevance":
        return {"right": float(not calls)}
    names = Counter(name for name, _ in calls or ())
    same = names == Counter(name for one in facts["right"] for name in one)
    right = bool(calls) and is_right(facts, calls or ())
    return {"right": float(right), "valid": float(bool(calls)), "wrong_arguments": float(same and not right)}


def is_right(facts: Mapping[str, Any], calls: Sequence[Call]) -> bool:
    """Return whether BFCL's checker takes the calls."""
    python = import_module("bfcl_eval.constants.enums").Language.PYTHON
    given = [{name: arguments} for name, arguments in calls]
    try:
        found = checker()(facts["functions"], given, facts["right"], python, facts["family"], _MODEL)
    except (AttributeError, LookupError, TypeError):  # on values of shapes that it does not expect
        return False
    return bool(found["valid"])


@cache
def checker() -> Callable[..., dict[str, Any]]:
    """Return BFCL's ``ast_checker``, imported without the clients of its models."""
    names = ModuleType(_CLIENTS)
    names.MODEL_CONFIG_MAPPING = {_MODEL: SimpleNamespace(underscore_to_dot=False)}  # type: ignore[attr-defined]
    before = sys.modules.get(_CLIENTS)
    sys.modules[_CLIENTS] = names
    try:
        found: Callable[..., dict[str, Any]] = import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker
    finally:
        if before is None:
            del sys.modules[_CLIENTS]
        else:
            sys.modules[_CLIENTS] = before
    return found


def _files(family: str) -> list[Path]:
    """Return the file of a family's questions, and that of their answers if there is one."""
    package = find_spec("bfcl_eval")
    assert package is not None and package.submodule_search_locations
    folder, name = Path(package.submodule_search_locations[0]) / "data", f"BFCL_v4_{family}.json"
    return [folder / name, *([] if family == "irrelevance" else [folder / "possible_answer" / name])]
