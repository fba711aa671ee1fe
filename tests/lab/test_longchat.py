"""Long conversations: every turn of every cache, the same answers where they are promised, and an end that is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import tokenizer
from families import tiny
from kvkeep_lab.longchat import caches, converse
from kvkeep_lab.longchat_figure import draw_longchat

from kvkeep import UsageError
from kvkeep.decode.chat import Conversation
from kvkeep.errors import SessionError

QUESTIONS = ("the of and to in", "was it for on", "by from her she that")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_cache_takes_every_turn_and_says_the_same(family: str) -> None:
    model = tiny(family)
    listed = caches(model, ("stock", "kv-direct", "full"), budget="16", checkpoint="kv", where="host")
    rows = list(converse(model, tokenizer(), listed, turns=4, max_new_tokens=6, questions=QUESTIONS))
    assert [(row.turn, row.method) for row in rows] == [
        (turn, name) for turn in (1, 2, 3, 4) for name in ("stock", "kv-direct", "full")
    ]
    assert all(row.same and row.written == 6 and row.read > 0 for row in rows)
    for name in listed:
        contexts = [row.context for row in rows if row.method == name]
        assert contexts == sorted(contexts) and contexts[-1] == listed[name].get_seq_length()


def test_the_budget_holds_while_the_stock_cache_grows() -> None:
    model = tiny("llama")
    listed = caches(model, ("stock", "kv-direct"), budget="16", checkpoint="kv", where="host")
    rows = list(converse(model, tokenizer(), listed, turns=6, max_new_tokens=6, questions=QUESTIONS))
    held = {name: [row.memory.resident_bytes for row in rows if row.method == name] for name in listed}
    assert held["stock"] == sorted(set(held["stock"])) and len(set(held["kv-direct"])) == 1
    assert rows[-1].memory.checkpoint_bytes["host"] > 0 == rows[-2].memory.checkpoint_bytes["host"]


def test_a_dropping_method_is_another_conversation() -> None:
    model = tiny("llama")
    listed = caches(model, ("stock", "window"), budget="16")
    rows = list(converse(model, tokenizer(), listed, turns=6, max_new_tokens=6, questions=QUESTIONS))
    assert not all(row.same for row in rows) and all(row.same for row in rows if row.method == "stock")


def test_the_models_positions_end_it_before_the_turn() -> None:
    """The tiny model has 512 positions."""
    model = tiny("llama")
    rows = converse(model, tokenizer(), caches(model, ("stock",)), turns=99, max_new_tokens=100)
    seen = []
    with pytest.raises(UsageError, match=r"Turn \d+ would take the conversation to \d+ tokens, and the model has 512"):
        seen.extend(rows)
        seen += rows
    rows = converse(model, tokenizer(), caches(model, ("streaming-llm",), budget="32"), turns=9, max_new_tokens=100)
    assert list(rows)[-1].turn == 9  # gives the model positions of its own


def test_a_method_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        caches(tiny("llama"), ("stock", "stock"))


def test_a_stock_conversation_cannot_be_saved(tmp_path: Path) -> None:
    model = tiny("llama")
    talk = Conversation(model, tokenizer(), caches(model, ("stock",))["stock"])
    assert talk.answer("the of", max_new_tokens=3).tokens
    with pytest.raises(SessionError, match="'full' can"):
        talk.save(tmp_path / "chat")


def test_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = tiny("llama")
    rows = list(
        converse(model, tokenizer(), caches(model, ("stock", "kv-direct"), budget="16"), turns=3, max_new_tokens=4)
    )
    draw_longchat(rows, tmp_path / "chat.png", title="tiny")
    assert (tmp_path / "chat.png").stat().st_size > 10_000
    with pytest.raises(UsageError):
        draw_longchat([], tmp_path / "none.png", title="tiny")
