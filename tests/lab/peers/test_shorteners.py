"""Prompts that fit: what stands for a text, within the budget, before a full cache."""

from __future__ import annotations

from typing import Any

import pytest
from kvkeep_lab.peers import peer_of
from kvkeep_lab.peers.shorteners import Summarised
from kvkeep_lab.subject import ReadText
from measuring import loaded, subject

from kvkeep.errors import BudgetError, UsageError

PEERS = ("prompt-newest", "prompt-bm25:size=8", "prompt-summary:tokens=4")
HEAD, TEXT, QUESTION, RIGHT = [3, 5], [*range(6, 86)], [40, 41, 4], [9, 9]
NEW = 3
READ = ReadText((*HEAD, *TEXT), len(HEAD) + len(TEXT) + len(QUESTION) + NEW, len(HEAD))


def select(method: str, limit: int, question: list[int] = QUESTION) -> list[int]:
    return list(peer_of(method).read(loaded(), TEXT, limit)(question))  # type: ignore[union-attr]


@pytest.mark.parametrize("limit", [16, 30, 79])
@pytest.mark.parametrize("method", PEERS)
def test_a_selection_is_within_the_limit(method: str, limit: int) -> None:
    found = select(method, limit)
    assert 0 < len(found) <= limit


@pytest.mark.parametrize("method", PEERS)
def test_a_text_within_the_limit_is_not_changed(method: str) -> None:
    assert select(method, len(TEXT)) == TEXT
    whole = subject().examine_after(READ, QUESTION, RIGHT, NEW)
    found = subject(method, "100%").examine_after(READ, QUESTION, RIGHT, NEW)
    assert found.logs == whole.logs and found.tokens == whole.tokens


@pytest.mark.parametrize("method", PEERS)
def test_the_full_cache_reads_the_head_the_selection_and_the_question(method: str) -> None:
    one = subject(method, "40")
    found = one.examine_after(READ, QUESTION, RIGHT, NEW)
    short = [*HEAD, *select(method, 40 - len(HEAD) - len(QUESTION) - NEW), *QUESTION]
    assert len(short) + NEW <= 40 == found.cost.entries
    expected = subject().examine(short, RIGHT, NEW)
    assert found.logs == pytest.approx(expected.logs, abs=1e-4) and found.tokens == expected.tokens
    assert (found.cost.prompt_tokens, found.cost.exactness) == (len(READ.ids) + len(QUESTION), "lossy")
    assert found.cost.whole_bytes == subject().examine_after(READ, QUESTION, RIGHT, NEW).cost.whole_bytes


def test_truncation_keeps_the_newest_tokens() -> None:
    assert select("prompt-newest", 16) == TEXT[-16:]


def test_bm25_finds_the_words_of_the_question_in_the_order_of_the_text() -> None:
    for question in (QUESTION, [70, 10], [10, 70]):
        found = select("prompt-bm25:size=8", 24, question)
        assert set(question) - {4} <= set(found) and found == sorted(found)
    assert len(select("prompt-bm25:size=8", 24)) == 8  # no other chunk has a word of it


def test_a_summary_stands_before_the_newest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    summarised: list[list[int]] = []

    def written(self: Summarised, one: Any, text: list[int]) -> list[int]:
        summarised.append(list(text))
        return [90, 91]

    monkeypatch.setattr(Summarised, "_written", written)
    found = select("prompt-summary:tokens=4", 20)
    assert found[:2] == [90, 91] and found[2:] == TEXT[-len(found) + 2 :]
    assert summarised[0] == TEXT[:10] and all(text[:2] == [90, 91] for text in summarised[1:])
    read = [token for text in summarised for token in text if token < 90]
    assert [*read, *found[2:]] == TEXT  # each token is summarised once, or kept


def test_a_summary_is_the_models_and_has_at_most_its_tokens() -> None:
    for tokens in (1, 4):
        assert 0 < len(Summarised(tokens)._written(loaded(), TEXT[:20])) <= tokens


def test_a_text_is_read_once_for_all_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    one, texts = subject("prompt-summary:tokens=4", "40"), []
    written = Summarised._written
    monkeypatch.setattr(
        Summarised, "_written", lambda self, given, text: texts.append(text) or written(self, given, text)
    )
    first = one.examine_after(READ, QUESTION, RIGHT, NEW)
    count = len(texts)
    assert count and one.examine_after(READ, QUESTION, RIGHT, NEW).logs == first.logs and len(texts) == count


def test_errors_are_one_sentence() -> None:
    with pytest.raises(UsageError, match="task that asks after the text"):
        subject("prompt-newest", "30").write(TEXT, 4)
    long_answers = ReadText(READ.ids, len(READ.ids) + 20, READ.head)
    with pytest.raises(BudgetError, match="budget of 16 tokens has no space for a text"):
        subject("prompt-newest", "16").examine_after(long_answers, QUESTION, RIGHT, NEW)
    with pytest.raises(BudgetError, match="prompt of 600 tokens exceeds the model's context of 512"):
        subject("prompt-newest", "600").examine_after(READ, QUESTION, RIGHT, NEW)
    with pytest.raises(UsageError, match="more than a third of the 30 tokens"):
        Summarised(20).read(loaded(), TEXT, 30)


def test_a_question_seen_is_not_for_shorteners() -> None:
    one = subject("prompt-newest", "30")
    assert one.at_once() is one
