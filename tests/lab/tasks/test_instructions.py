"""Verifiable instructions: their checks, and which tokens of a prompt they are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from conftest import WORDS, tokenizer
from kvkeep_lab.reading import PINNED
from kvkeep_lab.subject import at_once
from kvkeep_lab.tasks.instructions import HEAD, KINDS, Instructions, followed
from measuring import subject

from kvkeep.errors import BudgetError, UsageError

ANSWER = """In short: <<A review>> of [name] by [someone] in 42 lines
* A copper ladder
* A *long* winter
P.S. It says **very little**, really. Thank you for reading."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    draw = random.Random(0)
    (tmp_path / "a.txt").write_text(". ".join(" ".join(draw.choices(WORDS, k=9)) for _ in range(60)))
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("begin", "In short:", "My review:"),
        ("end", "Thank you for reading.", "Goodbye for now."),
        ("include", "copper", "cop"),
        ("number", 42, 4),
        ("bullets", 2, 3),
        ("placeholders", 2, 3),
        ("highlight", 2, 3),
    ],
)
def test_an_answer_follows_a_value_and_not_another(kind: str, right: object, wrong: object) -> None:
    assert followed(ANSWER, [(kind, right), (kind, wrong)]) == [True, False]


def test_letters_titles_and_postscripts_are_seen() -> None:
    asked = [("case", ""), ("title", ""), ("postscript", "")]
    assert followed(ANSWER, asked) == [False, True, True]
    assert followed(ANSWER.upper(), asked) == [True, True, True]
    assert followed(ANSWER.replace("<<", "<").replace("P.S.", "PS"), asked) == [False] * 3


def test_an_answer_without_sense_follows_nothing() -> None:
    every = [(kind, value) for kind, one in KINDS.items() for value in one.values]
    for text in ("", "no.", "the the the the", "* * * *", "1. 2. 3."):
        assert not any(followed(text, every))


def test_prompts_list_drawn_instructions_and_say_where_they_end(data: Path) -> None:
    task = Instructions(samples=3, count=4, text=40)
    made = tokenizer()
    found = task.prepare(made, task.sources(data), {}, 0)
    assert found == task.prepare(made, task.sources(data), {}, 0) != task.prepare(made, task.sources(data), {}, 1)
    for sample in found:
        assert len(sample.facts["chosen"]) == 4 == len({kind for kind, _ in sample.facts["chosen"]})
        assert 0 < sample.instructions < len(sample.ids) - 40
        head = made.decode(sample.ids[: sample.instructions])
        assert made.decode(made(HEAD).input_ids) in head


@pytest.mark.parametrize(
    ("method", "budget"),
    [
        ("full", None),
        ("stock", None),
        ("h2o", "60%"),
        ("kvzip+pinned", "80%"),
        ("random+pinned", "80%"),
    ],
)
def test_answers_that_share_passes_are_those_of_each_prompt(data: Path, method: str, budget: str | None) -> None:
    task, one = Instructions(samples=3, count=1, text=100, new=6), subject(method, budget)
    samples = task.prepare(tokenizer(), task.sources(data), {}, 0)
    found = one.write_each([sample.ids for sample in samples], 6, [sample.instructions for sample in samples])
    apart = [one.write(sample.ids, 6, pinned=sample.instructions) for sample in samples]
    assert [it.tokens for it in found] == [it.tokens for it in apart]
    assert [it.text for it in found] == [it.text for it in apart]
    for together, alone in zip(found, apart, strict=True):
        assert together.cost.held_bytes == alone.cost.held_bytes and together.cost.entries == alone.cost.entries
        assert together.cost.prompt_tokens == alone.cost.prompt_tokens
    assert [it.scores for it in task.outcomes(one, samples)] == [task.measure(one, it).scores for it in samples]


def test_a_pinned_method_keeps_the_instructions_and_others_may_not(data: Path) -> None:
    task = Instructions(samples=1, count=1, text=100, new=6)
    (sample,) = task.prepare(tokenizer(), task.sources(data), {}, 0)
    pinned, free, full = (
        task.measure(subject(method, budget), sample)
        for method, budget in ((f"random{PINNED}", "90%"), ("random", "90%"), ("full", None))
    )
    assert set(full.scores) == {metric.name for metric in task.metrics}
    assert pinned.cost.entries == free.cost.entries and pinned.cost.held_bytes == free.cost.held_bytes
    exact = subject(f"full{PINNED}").write(sample.ids, 6, pinned=sample.instructions)
    assert exact.tokens == subject("full").write(sample.ids, 6).tokens
    with pytest.raises(BudgetError, match="pinned tokens leave no room"):
        task.measure(subject(f"h2o{PINNED}", str(max(16, sample.instructions))), sample)
    with pytest.raises(UsageError, match="'h2o.pinned' pins instructions, and these prompts have none; use 'h2o'"):
        subject(f"h2o{PINNED}", "50%").write(sample.ids, 2)
    assert at_once("h2o+pinned") == "h2o+oneshot+pinned" and at_once("kvzip+pinned") == "kvzip+pinned"
