"""Long conversations: every turn of every cache, equal answers where promised, and a reported end."""

from __future__ import annotations

import pytest
from kvkeep_lab.partial import Ending
from kvkeep_lab.studies.long_chat import LongChat, Turn
from measuring import loaded, measured, quiet

QUESTIONS = ("the of and to in", "was it for on", "by from her she that")
LONG = ("the of and to in was it for on " * 12,)


@pytest.fixture(autouse=True)
def short_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep_lab.studies.long_chat.QUESTIONS", QUESTIONS)


def turns(*methods: str, family: str = "llama", count: int = 6) -> list[Turn]:
    """All turns of a conversation within 16 entries."""
    sizes = {"methods": methods, "budget": "16", "checkpoint": "kv", "where": "host", "turns": count, "new": 6}
    return list(LongChat.model_validate(sizes).converse(loaded(family), quiet))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_exact_caches_give_the_same_answers_in_every_turn(family: str) -> None:
    rows = turns("stock", "kv-direct", "full", family=family, count=4)
    assert [(row.turn, row.method) for row in rows] == [
        (turn, name) for turn in (1, 2, 3, 4) for name in ("stock", "kv-direct", "full")
    ]
    assert all(row.same and row.written == 6 and row.read > 0 for row in rows)
    contexts = {name: [row.context for row in rows if row.method == name] for name in ("stock", "kv-direct", "full")}
    assert contexts["stock"] == sorted(set(contexts["stock"])) == contexts["kv-direct"] == contexts["full"]


def test_a_budget_bounds_memory_and_only_dropping_changes_answers() -> None:
    rows = turns("stock", "kv-direct", "window")
    sizes = {name: [row.attended_bytes for row in rows if row.method == name] for name in ("stock", "kv-direct")}
    assert sizes["stock"] == sorted(set(sizes["stock"])) and len(set(sizes["kv-direct"])) == 1
    assert rows[-1].memory.checkpoint_bytes["host"] == 0 < rows[-2].memory.checkpoint_bytes["host"]
    assert {row.method for row in rows if not row.same} == {"window"}  # dropping: another conversation


def test_the_conversation_ends_before_a_turn_beyond_the_models_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model has 512 positions."""
    monkeypatch.setattr("kvkeep_lab.studies.long_chat.QUESTIONS", LONG)
    with pytest.raises(Ending, match=r"Turn 5 would take the conversation to \d+ tokens, and the model has 512") as end:
        measured(LongChat(methods=["stock"], turns=99, new=6))
    assert 400 < end.value.found.turns[-1].context <= 512 and len(end.value.found.turns) == 4
    endless = measured(LongChat(methods=["streaming-llm"], budget="32", turns=6, new=6))
    assert len(endless.turns) == 6 and endless.turns[-1].context > 512  # gives the model positions of its own
