"""Needles at all depths: every question is about the same text, and can be seen or unseen while the text is read."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tokenizer
from kvkeep_lab.reading import ReadCache
from kvkeep_lab.tasks.needles import KINDS, Needles, _text
from measuring import subject

from kvkeep.errors import UsageError
from kvkeep.reconstruction import _read_again

WORDS = ["I", "read", "and", "wrote", "much", "then."] * 50
LENGTH = 384


@pytest.fixture
def essays(tmp_path: Path) -> list[Path]:
    (tmp_path / "essay.txt").write_text(" ".join(WORDS))
    return [tmp_path / "essay.txt"]


def samples(essays: list[Path], question: str = "unseen", kind: str = "essays", seed: int = 0) -> Any:
    task = Needles(samples=1, length=[LENGTH], question=[question], kind=[kind])
    (point,) = task.points()
    return task, task.prepare(tokenizer(), essays, point, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_its_needles_at_the_stated_depth(kind: str) -> None:
    given = KINDS[kind]
    text, needles = _text(WORDS, given, 400, random.Random(0))
    assert len(needles) == given.keys == len({needle.key for needle in needles})
    for needle in needles:
        assert len(needle.values) == given.each
        places = [100 * text.index(f"for {needle.key} is: {value}.") / len(text) for value in needle.values]
        assert sum(places) / len(places) == pytest.approx(needle.depth, abs=5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_questions_share_a_text_that_ends_before_them(essays: list[Path], kind: str) -> None:
    _, found = samples(essays, kind=kind)
    text = found[0].facts["text"]
    assert len(found) == KINDS[kind].keys and all(one.facts["text"] is text for one in found)
    assert len({len(one.ids) for one in found}) == 1  # each sample has its whole question
    asked = "are all the" if KINDS[kind].each > 1 else "is the"
    assert tokenizer().decode(found[0].ids).removeprefix("<unk> ").startswith(asked)
    longest = max(len(one.ids) + len(one.facts["right"]) for one in found)
    assert 0.8 * text.context < len(text.ids) + longest <= text.context == LENGTH


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_is_the_same_for_every_text(essays: list[Path], kind: str) -> None:
    """So that a peer that shortens the text leaves the instruction."""
    first, second = (samples(essays, kind=kind, seed=seed)[1][0].facts["text"] for seed in (0, 1))
    assert first.ids[: first.head] == second.ids[: second.head]
    assert tokenizer().decode(first.ids[: first.head]).startswith("<user>") and 10 < first.head < 40


def test_if_the_question_is_seen_the_next_text_is_asked_the_next_questions(essays: list[Path]) -> None:
    depths = [[one.facts["depth"] for one in samples(essays, "seen", seed=seed)[1]] for seed in range(5)]
    assert depths == [[5, 15], [25, 35], [45, 55], [65, 75], [85, 95]]


def test_a_question_after_the_text_is_answered_as_in_one_prompt(essays: list[Path]) -> None:
    task, unseen = samples(essays)
    for one in unseen[:2]:
        after = task.measure(subject(), one)
        whole = subject().examine([*one.facts["text"].ids, *one.ids], one.facts["right"], one.facts["new"])
        assert after.scores["loglik"] == pytest.approx(sum(whole.logs) / len(whole.logs), abs=1e-4)
        assert after.cost.prompt_tokens == whole.cost.prompt_tokens and after.depth == one.facts["depth"]


@pytest.mark.parametrize("method", ["snapkv", "kvzip", "h2o+quantize:4"])
def test_no_question_changes_the_cache_of_the_next(essays: list[Path], method: str) -> None:
    task, (first, second, *_) = samples(essays)
    one = subject(method, "25%")
    task.measure(one, first)
    assert task.measure(one, second).scores == task.measure(subject(method, "25%"), second).scores


def test_the_text_is_read_within_the_budget_and_once(essays: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    task, (first, second, *_) = samples(essays)
    one = subject("snapkv", "64")
    read = []

    def note(model: Any, ids: Any, cache: Any, readings: Any) -> Any:
        read.append(ids.shape)
        return ReadCache(cache, torch.zeros(1), 0.0)

    monkeypatch.setattr("kvkeep_lab.subject.read_text", note)
    for sample in (first, second):
        assert task.measure(one, sample).cost.entries == 64
    assert read == [(1, len(first.facts["text"].ids))]


def test_only_methods_that_evict_are_changed_to_read_at_once() -> None:
    assert subject("snapkv", "64").at_once().method == "snapkv+oneshot"
    for method in ("full", "kvzip", "snapkv+oneshot", "stock"):
        assert subject(method).at_once().method == method


def test_a_length_without_room_is_refused(essays: list[Path]) -> None:
    task = Needles(length=[64])
    with pytest.raises(UsageError, match="no room for 10 needles"):
        task.prepare(tokenizer(), essays, task.points()[0], 0)


def test_methods_with_the_same_second_reading_share_it(essays: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    task, (sample, *_) = samples(essays)
    shared, passes = subject("kvzip", "40%"), []
    one = replace(shared, method="kvzip+tiers")
    monkeypatch.setattr(
        "kvkeep.reconstruction._read_again", lambda cache, made=_read_again: passes.append(1) or made(cache)
    )
    task.measure(shared, sample)
    assert len(passes) == 1 and len(shared.readings) == 1
    first = task.measure(one, sample)
    assert len(passes) == 1 and first.scores == task.measure(subject("kvzip+tiers", "40%"), sample).scores
    assert len(passes) == 2 and first.cost.entries is not None
