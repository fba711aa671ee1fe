"""LoCoMo: its prompts and the F1 of its code, on a conversation of the same form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import tokenizer
from kvkeep_lab.tasks.locomo import FILE, Locomo, f1, several_f1
from measuring import subject

from kvkeep.errors import UsageError

TURNS = [{"speaker": "Ann", "dia_id": f"D1:{number}", "text": f"I read book {number}."} for number in range(10)]
CONVERSATION = {
    "speaker_a": "Ann",
    "speaker_b": "Bob",
    "session_1_date_time": "1 May",
    "session_1": TURNS[:5],
    "session_2_date_time": "2 May",
    "session_2": [*TURNS[5:], TURNS[0] | {"dia_id": "D2:1", "blip_caption": "a photo of a book"}],
    "session_3_date_time": "3 May",  # without turns, as in the data
}
ASKED = [
    {"question": "What?", "answer": 7, "evidence": ["D1:0"], "category": 4},
    {"question": "When?", "answer": "May", "evidence": [], "category": 2},
    {"question": "Why?", "answer": "Joy; she says so", "evidence": ["D1:0", "D2:1"], "category": 3},
    {"question": "Who?", "answer": "Ann, Bob", "evidence": ["D2:1"], "category": 1},
    {"question": "Where?", "adversarial_answer": "here", "evidence": [], "category": 5},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / FILE
    path.parent.mkdir()
    path.write_text(json.dumps([{"conversation": CONVERSATION, "qa": ASKED}]))
    return tmp_path


def samples(data: Path, **sizes: Any) -> Any:
    task = Locomo(conversation=[0], **sizes)
    (point,) = task.points()
    return task, task.prepare(tokenizer(), task.sources(data), point, 0)


def test_questions_without_an_answer_are_left_out_and_places_are_those_of_the_evidence(data: Path) -> None:
    _, found = samples(data, samples=4)
    facts = [(one.facts["answer"], one.facts["depth"], one.facts["several"]) for one in found]
    last = 100 * 10 / 11
    assert facts == [("7", 0.0, False), ("May", None, False), ("Joy", last / 2, False), ("Ann, Bob", last, True)]


def test_questions_whose_answer_is_wrong_are_left_out_after_the_choice(data: Path) -> None:
    rows = [{"sample_id": "conv-26", "conversation": CONVERSATION, "qa": ASKED}]
    (data / FILE).write_text(json.dumps(rows))  # its question 2 is wrong
    _, found = samples(data, samples=4)
    assert [one.facts["answer"] for one in found] == ["7", "May", "Ann, Bob"]
    task = Locomo(conversation=[0], samples=1)
    with pytest.raises(UsageError, match="give more samples"):
        task.prepare(tokenizer(), task.sources(data), {"conversation": 0}, 2)


def test_all_questions_are_about_the_same_text(data: Path) -> None:
    task, found = samples(data, samples=4, new=3)
    text = found[0].facts["text"]
    assert all(one.facts["text"] is text for one in found) and len(text.ids) < text.context
    outcome = task.measure(subject("snapkv", "40"), found[0])
    assert set(outcome.scores) == {"loglik", "f1"} and outcome.cost.entries == 40
    assert outcome.cost.prompt_tokens == len(text.ids) + len(found[0].ids)


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ("The dogs!", "a dog", 1.0),
        ("a red dog", "the dog", 2 / 3),
        ("cat", "dog", 0.0),
        ("", "dog", 0.0),
    ],
)
def test_f1_counts_stemmed_words_without_articles(answer: str, right: str, expected: float) -> None:
    assert f1(answer, right) == pytest.approx(expected)


def test_several_answers_are_scored_one_by_one() -> None:
    assert several_f1("dogs, cats", "cat, mouse") == 0.5 and f1("dogs, cats", "cat, mouse") == 0.5
    assert several_f1("cat", "cat, mouse, bird, fish") == 0.25


def changed(**fields: Any) -> str:
    """The file with other fields of the conversation (or its questions, ``qa``); None removes one."""
    known = {"qa": ASKED, **CONVERSATION, **fields}
    asked = known.pop("qa")
    return json.dumps([{"conversation": {key: one for key, one in known.items() if one is not None}, "qa": asked}])


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", '[{"qa": []}]', '[{"conversation": {}, "qa": [{}]}]', changed(qa=[]), changed(speaker_a=None),
        changed(session_1_date_time=None), changed(session_1=["I read."]), changed(session_1=[{"speaker": "Ann"}]),
        changed(qa=[ASKED[0] | {"question": 7}]), changed(qa=[ASKED[0] | {"evidence": None}]),
    ],
)  # fmt: skip
def test_a_file_of_another_shape_is_refused_in_a_sentence(data: Path, content: str) -> None:
    (data / FILE).write_text(content)
    with pytest.raises(UsageError, match="has no conversation 0 in the form of LoCoMo"):
        Locomo(conversation=[0]).sources(data)  # before a model is loaded
