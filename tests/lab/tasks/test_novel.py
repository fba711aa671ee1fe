"""The novel: its questions, and a made-up novel that answers them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import tokenizer
from kvkeep_lab.tasks.needle import contains
from kvkeep_lab.tasks.novel import FILE, QUESTIONS, Novel, NovelRephrased
from measuring import subject

from kvkeep.errors import UsageError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a novel of nothing but the evidence."""
    (tmp_path / FILE).write_text("\n\n".join(one.evidence for one in QUESTIONS))
    return tmp_path


def samples(data: Path, length: int = 450, **sizes: Any) -> Any:
    task = Novel(length=[length], **sizes)
    (point,) = task.points()
    return task, task.prepare(tokenizer(), task.sources(data), point, 0)


def test_there_are_thirty_questions_and_none_has_its_answer() -> None:
    assert len(QUESTIONS) == len({one.question for one in QUESTIONS}) == 30
    for one in QUESTIONS:
        assert one.question.endswith("?") and not one.lead.endswith(" ") and one.answers and one.evidence
        assert not any(contains(f"{one.question} {one.lead}", answer) for answer in one.answers), one


def test_a_rephrased_question_has_no_word_of_its_evidence() -> None:
    for one in QUESTIONS:
        asked = f"{one.rephrased} {one.rephrased_lead}"
        shared = {word[:5] for word in long_words(asked)} & {word[:5] for word in long_words(one.evidence)}
        assert one.rephrased.endswith("?") and not shared, (one.question, shared)
        assert not any(contains(asked, answer) for answer in one.answers), one


def long_words(text: str) -> list[str]:
    return re.findall(r"[a-z]{5,}", text.casefold())


def test_the_answers_are_words_of_the_evidence() -> None:
    for one in QUESTIONS:
        assert contains(one.evidence, one.answers[0]) or one.answers[0].casefold() in one.evidence.casefold(), one


def test_all_questions_are_about_one_text_that_is_the_novel_after_its_head(data: Path) -> None:
    _, found = samples(data)
    text = found[0].facts["text"]
    assert len(found) == 30 and all(one.facts["text"] is text for one in found)
    depths = [one.facts["depth"] for one in found]
    assert depths == sorted(depths) and depths[0] < 5 and depths[-1] > 90
    words = len("\n\n".join(one.evidence for one in QUESTIONS).split())
    assert len(text.ids) - text.head == words
    longest = max(len(one.ids) + max(8, len(one.facts["right"])) for one in found)
    assert len(text.ids) + longest == text.context


def test_the_rephrased_questions_have_the_same_text_and_answers(data: Path) -> None:
    _, plain = samples(data)
    task = NovelRephrased(length=[450])
    other = task.prepare(tokenizer(), task.sources(data), task.points()[0], 0)
    for one, rephrased in zip(plain, other, strict=True):
        assert one.facts["right"] == rephrased.facts["right"] and one.facts["answers"] == rephrased.facts["answers"]
        assert one.ids != rephrased.ids and one.facts["text"].head == rephrased.facts["text"].head


def test_only_questions_are_asked_whose_answer_was_read(data: Path) -> None:
    task, found = samples(data, 64, samples=3)
    assert len(found) == 3
    limit = found[0].facts["text"].head + 64
    assert len(found[0].facts["text"].ids) <= limit
    with pytest.raises(UsageError, match=r"first 64 tokens of .* answer \d questions, and 30 are wanted"):
        task.model_copy(update={"samples": 30}).prepare(tokenizer(), task.sources(data), {"length": 64}, 0)


@pytest.mark.parametrize("method", ["full", "streaming-llm", "prompt-newest", "prompt-bm25:size=16"])
def test_every_way_to_read_answers(data: Path, method: str) -> None:
    task, found = samples(data, 200, samples=2)
    outcome = task.measure(subject(method, None if method == "full" else "96"), found[1])
    assert outcome.scores["loglik"] < 0 and outcome.scores["found"] in (0.0, 1.0)
    assert outcome.depth == found[1].facts["depth"]


def test_any_of_the_right_answers_counts(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, (first, *_) = samples(data, samples=30)
    one = subject()

    class Answer:
        logs, cost = (-1.0, -2.0), None
        text = "in the year 6."

    monkeypatch.setattr(one, "examine_after", lambda *given: Answer)
    for answers, right in ((["six", "6"], 1.0), (["six"], 0.0)):
        first.facts["answers"] = answers
        assert task.measure(one, first).scores == {"loglik": -1.5, "found": right}
