"""A conversation reads only what is new, and gives what one long prompt would have given."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import tokenizer
from families import tiny
from helpers import broken

from kvkeep import Conversation, KeepCache, generate
from kvkeep.stock import new_cache


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_turns_equal_one_long_prompt(family: str) -> None:
    model = tiny(family)
    talk = Conversation(model, tokenizer(), KeepCache(model, "kv-direct", 16, checkpoint="kv", where="host"))
    for text in ("the of and to in", "was it for on", "by from her she that"):
        prompt = talk.prompt(text)
        alone = generate(model, tokenizer(), prompt, KeepCache(model), max_new_tokens=12)
        assert talk.answer(text, max_new_tokens=12).tokens == alone.tokens
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 3


@pytest.mark.parametrize(("method", "kind"), [("kv-direct", "residual"), ("snapkv:window=4,kernel=3+verified:5", "kv")])
def test_a_conversation_goes_on_another_day(tmp_path: Path, method: str, kind: str) -> None:
    """In rounds, too."""
    model = tiny("llama")
    talk = Conversation(model, tokenizer(), KeepCache(model, method, 16, checkpoint=kind, where="host"))
    plain = Conversation(model, tokenizer(), KeepCache(model))
    for one in (talk, plain):
        one.answer("the of and to in was it for", max_new_tokens=12)
    talk.save(tmp_path / "chat")
    again = Conversation.resume(model, tokenizer(), tmp_path / "chat")
    assert again.messages == talk.messages and again.ids == talk.ids
    told: list[int] = []
    length = again.cache.get_seq_length()
    answers = [one.answer("by from her", max_new_tokens=12, on_progress=told.append) for one in (again, talk, plain)]
    assert answers[0].tokens == answers[1].tokens == answers[2].tokens and answers[0].exactness == "exact"
    assert length < told[0] < length + 12  # nothing was read twice
    assert (answers[0].rounds is not None) == ("verified" in method)


@pytest.mark.parametrize("method", ["stock", "full", "kv-direct", "h2o"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_question_interrupted_within_a_step_is_forgotten(family: str, method: str) -> None:
    """Of a step some layers have taken the tokens and others have not; sliding windows cannot take theirs back."""
    model = tiny(family)

    def ask(interrupt: bool) -> list[int]:
        cache = new_cache(model, method, budget=16 if method in ("kv-direct", "h2o") else None)
        talk = Conversation(model, tokenizer(), cache)
        talk.answer("the of and to in " * 6, max_new_tokens=4)
        if interrupt:
            for layer in (2, 0):
                with broken(model, layer, KeyboardInterrupt):
                    talk.answer("was it for on " * 9, max_new_tokens=4)
        assert len(talk.messages) == 2
        return talk.answer("by from her", max_new_tokens=9).tokens

    whole = ask(True), ask(False)
    assert whole[0] == whole[1] or method == "h2o"
