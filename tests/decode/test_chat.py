"""A conversation reads only what is new, and gives what one long prompt would have given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import RECURRENT
from conftest import saved, tokenizer
from families import tiny
from helpers import bounded, broken

from kvkeep import BudgetError, Conversation, KeepCache, generate, load
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.memory.rows import BLOCK
from kvkeep.stock import memory_of, new_cache


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_turns_equal_one_long_prompt(family: str) -> None:
    model = tiny(family)
    talk = Conversation(model, tokenizer(), KeepCache(model, "kv-direct", 16, checkpoint="kv", where="host"))
    for text in ("the of and to in", "was it for on", "by from her she that"):
        prompt = talk.prompt(text)
        alone = generate(model, tokenizer(), prompt, KeepCache(model), max_new_tokens=12)
        assert talk.answer(text, max_new_tokens=12).tokens == alone.tokens
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 3


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
def test_an_error_in_a_pass_with_drafts_leaves_the_conversation_as_before(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's disk is full when a layer stores the entries that verify drafts."""
    model, failures = tiny(family), 0
    talk = Conversation(
        model, tokenizer(), KeepCache(model, "snapkv:window=4,kernel=3+verified:5", 32, checkpoint="kv")
    )
    talk.answer("the of and to in was it for on " * 9, max_new_tokens=6)
    reader = talk.cache.stream.bounded[-1].reader
    settling, begun = reader.settling, len(talk.prompt("by from her she that"))

    def failing(layer: Any, keys: Any, *given: Any) -> None:
        nonlocal failures
        if 1 < keys.shape[1] < 6 and talk.cache.draft_passes.begun >= begun:
            failures += 1
            raise OSError(28, "No space left on device")
        settling(layer, keys, *given)

    monkeypatch.setattr(reader, "settling", failing)
    with pytest.raises(OSError, match="No space left"):
        talk.answer("by from her she that", max_new_tokens=12)
    assert failures == 1
    monkeypatch.undo()
    prompt = talk.prompt("by from her she that")
    alone = generate(model, tokenizer(), prompt, KeepCache(model), max_new_tokens=12)
    assert talk.answer("by from her she that", max_new_tokens=12).tokens == alone.tokens


@pytest.mark.parametrize(("method", "kind"), [("kv-direct", "residual"), ("snapkv:window=4,kernel=3+verified:5", "kv")])
def test_a_conversation_goes_on_another_day(tmp_path: Path, method: str, kind: str) -> None:
    """With drafts, too."""
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
    assert "verified" not in method or answers[0].drafted


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


@pytest.mark.parametrize("method", ["kv-direct", "h2o", "stock"])
def test_what_is_forgotten_is_in_no_cache_and_no_file(tmp_path: Path, method: str) -> None:
    """Also what was read of a question that was not answered."""
    model, own, file = tiny("llama"), tokenizer(), tmp_path / "s"
    talk, again = (
        Conversation(model, own, new_cache(model, method, budget=None if method == "stock" else 16)) for _ in range(2)
    )
    secret = "by from her " * 100
    ids = own("by from her " * 3).input_ids
    named, stored = ",".join(map(str, ids)).encode(), torch.tensor(ids, dtype=torch.int32).numpy().tobytes()

    def on_disk() -> bool:
        if method == "stock":
            return talk.turns > 2
        talk.save(file)
        held = b"".join(path.read_bytes() for path in file.rglob("*") if path.is_file())
        assert Conversation.resume(model, own, file).ids == talk.ids and (named in held) == (secret.encode() in held)
        assert named in held or stored not in held
        return named in held

    for text in ("the of and to in", "was it for on", secret):
        talk.answer(text, max_new_tokens=4)
        told = on_disk()
    assert told and talk.undo() == secret and talk.turns == 2 and not on_disk()
    assert bool(talk.ids) == (method != "h2o"), "what is left is not read again"
    again.messages = list(talk.messages)
    with broken(model, 2, KeyboardInterrupt):
        talk.answer(secret)
    assert talk.messages == again.messages and "from" not in own.decode(talk.ids) and not on_disk()
    prompt = own.apply_chat_template([*talk.messages, {"role": "user", "content": "?"}], add_generation_prompt=True)
    assert talk.ids == prompt.input_ids[: len(talk.ids)] and len(talk.ids) == talk.cache.get_seq_length()
    assert talk.answer("as with", max_new_tokens=4).tokens == again.answer("as with", max_new_tokens=4).tokens
    talk.forget(1)
    assert talk.turns == 2 and len(talk.ids) < 3
    talk.answer("it for", max_new_tokens=2)
    talk.set_system("his")
    assert talk.turns == 3 and len(talk.ids) < 3
    assert repr(talk).startswith(f"Conversation(turns=3, tokens={len(talk.ids)}, cache=")
    talk.answer("it for", max_new_tokens=2)
    talk.reset()
    assert not talk.ids and not memory_of(talk.cache).resident_bytes


@pytest.mark.turns(6)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(("family", "new"), [*((family, 9) for family in RECURRENT), ("lfm2", 530), ("gemma3", 530)])
def test_undo_and_retry_read_a_block_at_most_where_layers_cannot_be_cropped(
    family: str, new: int, stored: bool, tmp_path: Path
) -> None:
    """Also after the conversation was saved and resumed: windows and recurrent states at ends of blocks are saved."""
    model, words = (
        load(saved(tiny(family, positions=4096), tmp_path), weights="bfloat16", device="cpu").model,
        tokenizer(),
    )
    talk = Conversation(model, words, KeepCache(model, "kv-direct", 100, checkpoint="kv", where="host"))
    first, long, other = "the of and to in was " * 70, "it for on by from her " * 110, "she that with as his"
    options: Any = {"ignore_eos": True}

    def again() -> Conversation:
        if not stored:
            return talk
        talk.save(tmp_path / "talk")
        return Conversation.resume(model, words, tmp_path / "talk")

    def whole(messages: Any, question: str) -> Any:
        """The answer of a conversation that reads all of it."""
        fresh = Conversation(model, words, KeepCache(model, "kv-direct", 100, checkpoint="kv", where="host"))
        fresh.messages = list(messages)
        return fresh.answer(question, max_new_tokens=9, **options)

    talk.answer(first, max_new_tokens=9, **options)
    before, known = list(talk.messages), len(talk.ids)
    talk.answer(long, max_new_tokens=new, **options)
    talk = again()
    assert len(talk.cache.stream.record.ends) == (3 if new > BLOCK else 2)  # type: ignore[attr-defined]
    result = talk.retry(max_new_tokens=9, **options)
    assert result.timing.prefill_tokens <= BLOCK and result.tokens == whole(before, long).tokens
    talk = again()
    assert talk.undo() == long and known - BLOCK < len(talk.ids) <= known + 2
    talk = again()
    result = talk.answer(other, max_new_tokens=9, **options)
    assert result.timing.prefill_tokens <= BLOCK + result.prompt_tokens - known
    assert result.tokens == whole(before, other).tokens


@pytest.mark.parametrize("method", ["full", "kv-direct", "h2o"])
def test_undo_retry_and_a_further_name_cost_a_reference_and_a_state(method: str, tmp_path: Path) -> None:
    model, store = tiny("llama", positions=4096), Store(tmp_path)
    budget = None if method == "full" else 100
    talk = Conversation(model, tokenizer(), KeepCache(model, method, budget))
    known: set[Path] = set()

    def written(name: str = "talk") -> list[int]:
        """Save, and return the sizes of the new blocks; the last one is that of the state."""
        with StoredSession(store, name, writing=True) as stored:
            talk.save(stored)
            assert stored.about is not None
            state = store.blocks.path(stored.block(stored.about["state"]))
        new = {*tmp_path.rglob("*.block")} - known
        known.update(new)
        return [*(path.stat().st_size for path in new - {state}), state.stat().st_size]

    talk.answer("the of and to in was " * 100, max_new_tokens=4)
    first = written()
    assert len(first) == (1 if method == "h2o" else 3)
    talk.answer("it for on", max_new_tokens=4)
    for change in (lambda: None, lambda: talk.retry(max_new_tokens=4), talk.undo):
        change()
        sizes = written()
        assert len(sizes) == 1 and (method == "h2o" or sizes[0] < first[0])
    assert len(written("other")) == 1


def pinned_slots(talk: Conversation, count: int) -> bool:
    """Whether every lane holds the entries of the first ``count`` tokens."""
    assert isinstance(talk.cache, KeepCache)
    return all(bool(layer.resident.resident_slots()[:, :count].all()) for layer in bounded(talk.cache))


def test_a_pinned_system_prompt_stays_through_turns_and_another_day(tmp_path: Path) -> None:
    """And another system prompt has other pins, from the next answer on."""
    model, words = tiny("llama"), "it was for the and of to in on by"
    talk = Conversation(model, tokenizer(), KeepCache(model, "window", 24), system="the of and to in", pin="system")
    for turn in range(3):
        talk.answer(words, max_new_tokens=4)
        assert talk.cache.method.pin == 7 and pinned_slots(talk, 7)  # the names of two roles, and five words
        assert pinned_slots(talk, 8) == (turn == 0)  # the text of one turn fits
    talk.save(tmp_path / "s")
    again = Conversation.resume(model, tokenizer(), tmp_path / "s")
    assert (
        again.pin == "system"
        and again.answer(words, max_new_tokens=4).tokens == talk.answer(words, max_new_tokens=4).tokens
    )
    assert again.cache.method.pin == 7 and pinned_slots(again, 7)
    again.set_system("the of")
    again.answer(words, max_new_tokens=4)
    assert again.cache.method.pin == 4 and pinned_slots(again, 4)
    again.set_system(f"{words} {words} {words}")
    with pytest.raises(BudgetError, match="32 pinned tokens leave no room for others in a budget of 24"):
        again.answer(words)
    fixed = Conversation(model, tokenizer(), KeepCache(model, "window", 24, pin=5))
    fixed.answer(f"{words} {words} {words}", max_new_tokens=4)
    assert pinned_slots(fixed, 5) and fixed.cache.method.pin == 5
