"""A prompt that differs from what a cache has read is answered as by a cache that has read nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import CASES, new_cache, pairs
from conftest import WORDS, tokenizer
from families import tiny
from helpers import prompt

from kvkeep import Conversation, KeepCache, generate
from kvkeep.decode.cached_text import CachedText

WORDS_OF_A_TURN = 60
"""Two turns exceed every case's budget."""


def _said(seed: int, count: int = WORDS_OF_A_TURN) -> str:
    return " ".join(WORDS[(seed + 7 * number) % len(WORDS)] for number in range(count))


@pytest.mark.turns(10)
@pytest.mark.parametrize(("name", "family"), pairs(12))
def test_another_prompt_behind_a_common_prefix(name: str, family: str) -> None:
    """The last one is a part of what was read."""
    case, past, model = CASES[name], CachedText(new_cache(name, family)), tiny(family)
    length = 190 if case.length > 90 else 90
    texts = prompt(3, length).tolist()
    past.settle(generate(model, None, texts[0], past.cache, max_new_tokens=2).sequence)
    for at, ids in ((length - 9, texts[1]), (70, texts[2][:71])):
        ids = [*past.ids[:at], *ids[at:]]
        past.align(ids)
        assert len(past.ids) == past.cache.get_seq_length()
        assert len(past.ids) in ((0, at) if case.equals else (0,))
        caches = past.cache, new_cache(name, family)
        told, fresh = (generate(model, None, ids, cache, max_new_tokens=4) for cache in caches)
        assert told.tokens == fresh.tokens
        past.settle(told.sequence)


def _undo(talk: Conversation) -> None:
    talk.undo()


def _edit(talk: Conversation) -> None:
    """As a caller may who regards messages as data."""
    talk.messages[-1] = talk.messages[-1] | {"content": _said(11, 5)}


def _interrupt(talk: Conversation) -> None:
    """Within a question, whose first chunk has been read."""
    done = 0

    def stop(count: int) -> None:
        nonlocal done
        done += 1
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.answer(_said(2), on_progress=stop)


CHANGES: dict[str, Callable[[Conversation], Any]] = {
    "undo": _undo,
    "edit": _edit,
    "forget": lambda talk: talk.forget(1),
    "system": lambda talk: talk.set_system("his"),
    "interrupt": _interrupt,
}


@pytest.mark.turns(5)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", ["window", "streaming-llm:sinks=3", "h2o", "snapkv:window=4,kernel=3", "h2o+sketch"])
def test_a_lossy_conversation_that_changes(method: str, change: str) -> None:
    """Its next answer is that of a conversation that begins with these messages."""
    model, words = tiny("llama"), tokenizer()

    def begun() -> Conversation:
        return Conversation(model, words, KeepCache(model, method, 24, chunk=16))

    talk, fresh = begun(), begun()
    for seed in (3, 5):
        talk.answer(_said(seed), max_new_tokens=4, ignore_eos=True)
    CHANGES[change](talk)
    fresh.messages = [dict(message) for message in talk.messages]
    answers = [one.answer(_said(9), max_new_tokens=9, ignore_eos=True) for one in (talk, fresh)]
    assert answers[0].tokens == answers[1].tokens
    assert talk.retry(max_new_tokens=9, ignore_eos=True).tokens == answers[1].tokens
