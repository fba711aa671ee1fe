"""RULER as a task: prompts as long as they may be, and its own metric."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from conftest import WORDS, tokenizer
from kvkeep_lab.tasks.ruler import Ruler
from kvkeep_lab.tasks.ruler.families import FAMILIES, GENERATED
from kvkeep_lab.tasks.ruler.task import largest, string_match
from measuring import subject

from kvkeep.errors import UsageError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "haystack").mkdir()
    draw = random.Random(0)
    sentences = (" ".join(draw.choices(WORDS, k=9)) for _ in range(60))
    (tmp_path / "haystack" / "a.txt").write_text(". ".join(sentences))
    paragraphs = [
        {"context": f"{word} is here", "qas": [{"question": f"where is {word}", "answers": [{"text": "here"}]}]}
        for word in WORDS
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return tmp_path


def test_the_official_string_match_by_hand() -> None:
    assert string_match(" It is 12,\n Ann and Bob.", ["ann", "BOB", "Cid", "12"], some=False) == 0.75
    assert string_match("ann", ["Ann", "Bob"], some=True) == 1.0 and string_match("cid", ["Ann"], some=True) == 0.0


@pytest.mark.parametrize("most", [None, 5, 60, 100])
@pytest.mark.parametrize("room", [30, 31, 100, 2000])
def test_the_largest_that_fits(room: int, most: int | None) -> None:
    fits = [size for size in range(3, (most or 1000) + 1) if 10 * size <= room]
    assert largest(lambda size: 10 * size, room, 3, most) == max(fits)
    assert largest(lambda size: 10 * size, 29, 3, most) is None


@pytest.mark.parametrize("name", [*GENERATED, "qa_1"])
def test_prompts_fill_the_length(data: Path, name: str) -> None:
    task = Ruler(length=[1500], family=[name], samples=2, new=20)
    sources = task.sources(data)
    first, second = task.prepare(tokenizer(), sources, task.points()[0], 0)
    assert [first, second] == task.prepare(tokenizer(), sources, task.points()[0], 0) and first != second
    assert first != task.prepare(tokenizer(), sources, task.points()[0], 1)[0]
    for sample in (first, second):
        whole = len(WORDS) * 5 if name == "qa_1" else 1500 - 20  # all there is, or a unit less than there is room for
        assert whole - 60 < len(sample.ids) <= 1500 - 20
        assert sample.facts["new"] == 20 and sample.facts["some"] == (name == "qa_1")
    official = Ruler().prepare(tokenizer(), sources, task.points()[0], 0)[0]
    assert official.facts["new"] == FAMILIES[name].new


def test_only_the_files_that_are_needed_are_wanted(data: Path, tmp_path: Path) -> None:
    assert Ruler(family=["niah_single_1", "vt", "cwe", "fwe"]).sources(None) == []
    assert [path.name for path in Ruler(family=["niah_single_2", "qa_1"]).sources(data)] == ["a.txt", "squad.json"]
    assert [path.name for path in Ruler(family=["qa_1"]).sources(data / "squad.json")] == ["squad.json"]
    with pytest.raises(UsageError, match="give --data FOLDER, with .txt files"):
        Ruler().sources(None)
    with pytest.raises(UsageError, match="There is no file .*hotpotqa.json"):
        Ruler(family=["qa_2"]).sources(data)


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(ValueError, match="Unknown family of RULER 'niah_single': did you mean niah_"):
        Ruler(family=["niah_single"])
    with pytest.raises(UsageError, match="A length of 128 tokens has no room for RULER's cwe"):
        Ruler(family=["cwe"]).prepare(tokenizer(), [], {"length": 128, "family": "cwe"}, 0)


def test_an_answer_is_measured(data: Path) -> None:
    task = Ruler(length=[300], family=["niah_single_1"], samples=1, new=4)
    (sample,) = task.prepare(tokenizer(), [], task.points()[0], 0)
    one = subject("kv-direct", "32")
    found = task.measure(one, sample)
    assert set(found.scores) == {metric.name for metric in task.metrics} and found.cost.prompt_tokens == len(sample.ids)
    sample.facts["answers"] = [one.write(sample.ids, 4).text, "never said"]
    assert task.measure(one, sample).scores["match"] == 0.5
