"""Drafts change the number of passes, and nothing else: tokens, texts, and what the cache holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import saved, tokenizer
from families import tiny
from helpers import prompt
from scripted import END, byte_level, scripted

import kvkeep
from kvkeep import KeepCache
from kvkeep.engine import drafts
from kvkeep.engine.answer import Answer, Ask, Scheduler
from kvkeep.engine.drafts import Copies, PassPrices, can_draft
from kvkeep.engine.forms import of_regex
from kvkeep.engine.grammar import Grammar, vocabulary
from kvkeep.engine.sampling import Sampling
from kvkeep.models.loading import load
from kvkeep.transfer import parts, tensor_of

KINDS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "kv-direct": {"method": "kv-direct", "budget": 48, "chunk": 32, "checkpoint": "kv", "where": "host"},
    "residual": {"method": "kv-direct", "budget": 48, "chunk": 32},
}
CHEAP = 0.05
"""The price of a row that makes every copy worth a try."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def model(folder: Path, family: str) -> Any:
    """A tiny model whose products the native library computes."""
    return load(saved(tiny(family, positions=2048), folder / family), weights="bfloat16", device="cpu").model


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch, kernels: None) -> None:
    """Every row costs next to nothing, and drafts are thought to be right: many are read, and many are wrong."""
    monkeypatch.setattr(PassPrices, "of", lambda self, rows: 1 + CHEAP * rows)
    monkeypatch.setattr(drafts, "GUESSES", 1000)
    monkeypatch.setattr(drafts, "GRAM", 1)


def answer(model: Any, ids: Sequence[int], kind: str, **given: Any) -> Answer:
    ask = Ask(ids, given.pop("most", 60), **given)
    return Answer(ask, KeepCache(model, **KINDS[kind]), tokenizer(), [], lambda piece: None)


def run(model: Any, answers: Sequence[Answer], copies: bool = True) -> int:
    """Complete answers with or without drafts; return the number of passes."""
    model.generation_config.prompt_lookup_num_tokens = None if copies else 0
    passes = 0
    scheduler = Scheduler(model)
    for one in answers:
        scheduler.add(one)
    while scheduler.answers:
        passes += 1
        for result in scheduler.step():
            if result.scheduled.give(result.logits):
                scheduler.answers.remove(result.scheduled)
    model.generation_config.prompt_lookup_num_tokens = None
    return passes


def repeating(seed: int = 1) -> list[int]:
    """A text in which most trigrams occur several times."""
    part = prompt(1, 40, seed)[0].tolist()
    return [*part, *part[5:30], *part[:20], *part]


def same(one: KeepCache, other: KeepCache) -> None:
    ours, theirs = parts(one), parts(other)
    assert [*ours] == [*theirs]
    for name in ours:
        if name.startswith(("layer.", "checkpoint.")) and KINDS["full"]["method"] == one.method.name:
            assert torch.equal(tensor_of(ours[name]), tensor_of(theirs[name])), name


@pytest.mark.turns(6)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=3), Sampling(repetition=1.2)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_drafts_change_no_token(family: str, kind: str, sampling: Sampling, folder: Path) -> None:
    one = model(folder, family)
    for seed in range(3):
        found, plain = (answer(one, repeating(seed), kind, sampling=sampling) for _ in range(2))
        run(one, [found])
        run(one, [plain], copies=False)
        assert found.tokens == plain.tokens and found.text == plain.text
        assert plain.drafter is None and not plain.drafted and 0 < found.drafted >= found.accepted
        assert found.cache.get_seq_length() == plain.cache.get_seq_length()
        same(found.cache, plain.cache)
        more = [*repeating(seed), *found.tokens, 7, 8, 9]
        results = [kvkeep.generate(one, tokenizer(), more, own.cache, max_new_tokens=9) for own in (found, plain)]
        assert results[0].tokens == results[1].tokens


def test_some_drafts_are_right_and_some_are_wrong(folder: Path) -> None:
    one = model(folder, "llama")
    found = [answer(one, repeating(seed), "full", sampling=Sampling(temperature=0.5, seed=1)) for seed in range(8)]
    run(one, found)
    assert 0 < sum(one.accepted for one in found) < sum(one.drafted for one in found)


def test_answers_of_one_pass_have_their_own_drafts(folder: Path) -> None:
    one = model(folder, "llama")
    cases = [("full", repeating(1)), ("kv-direct", repeating(2)), ("full", prompt(1, 50, 3)[0].tolist())]
    wanted = []
    for kind, ids in cases:
        wanted.append(answer(one, ids, kind))
        run(one, wanted[-1:], copies=False)
    found = [answer(one, ids, kind) for kind, ids in cases]
    run(one, found)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]


@pytest.mark.turns(2)
@pytest.mark.parametrize("most", [1, 2, 3, 17])
@pytest.mark.parametrize("stop", [0, 5, 11])
def test_an_answer_ends_where_it_ends_without_drafts(most: int, stop: int, folder: Path) -> None:
    one = model(folder, "llama")
    plain = answer(one, repeating(), "full", most=30)
    run(one, [plain], copies=False)
    ending = tokenizer().decode(plain.tokens[stop : stop + 2]).strip()
    for stops in ((), (ending,)):
        both = [answer(one, repeating(), "full", most=most, stops=stops) for _ in range(2)]
        for number, each in enumerate(both):
            run(one, [each], copies=not number)
        assert both[0].tokens == both[1].tokens and both[0].reason == both[1].reason
        assert both[0].text == both[1].text
        same(both[0].cache, both[1].cache)


@pytest.mark.parametrize("pattern", ["the river and the stone", "(a|b)cdefg{3,9}hij", '[{]"name": "(sun|rain)"[}]'])
def test_what_a_form_wants_is_read_at_once(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    made = byte_level("yes", "the", " river", "ver")
    loaded = scripted(made, made.script(["Q", "yes", END]))
    ends = [loaded.tokenizer.eos_token_id]
    form = Grammar(vocabulary(loaded.tokenizer, len(made.tokens), ends), of_regex(pattern))
    monkeypatch.setattr("kvkeep.engine.answer.can_draft", lambda cache: True)  # torch's bits do not matter here
    found = []
    for copies in (True, False):
        ask = Ask(loaded.tokenizer("a Q").input_ids, 60, Sampling(grammar=form))
        one = Answer(ask, KeepCache(loaded.model), loaded.tokenizer, ends, lambda piece: None)
        passes = run(loaded.model, [one], copies)
        found.append((one.tokens, one.text, one.reason, passes))
    assert found[0][:3] == found[1][:3] and found[0][3] <= 0.7 * found[1][3]
    assert re.fullmatch(pattern, found[0][1])


def test_an_interrupted_pass_leaves_no_draft(folder: Path) -> None:
    """After the pass, and before the answer has seen it."""
    for family in ("llama", "gemma3"):
        one = model(folder, family)
        found = answer(one, repeating(), "full")
        scheduler = Scheduler(one)
        scheduled = scheduler.add(found)
        while True:
            (result,) = scheduler.step()
            if found.tokens and len(result.read.ids) > 1:
                break
            scheduled.give(result.logits)
        read = found.cache.get_seq_length()
        scheduler.remove(scheduled)
        ids = [*repeating(), *found.tokens]
        assert found.cache.get_seq_length() == len(ids) < read
        wanted = kvkeep.generate(one, tokenizer(), [*ids, 5], KeepCache(one), max_new_tokens=9)
        assert kvkeep.generate(one, tokenizer(), [*ids, 5], found.cache, max_new_tokens=9).tokens == wanted.tokens


def test_what_cannot_be_taken_back_or_has_other_bits_has_no_drafts(folder: Path) -> None:
    ids = repeating()
    assert can_draft(KeepCache(model(folder, "llama")))
    assert not can_draft(KeepCache(tiny("llama")))  # torch's products depend on the number of rows
    for family, options in (
        ("llama", {"method": "h2o", "budget": 32}),
        ("gpt2", {"method": "full"}),
    ):
        one = model(folder, family)
        assert not can_draft(KeepCache(one, **options))
        assert kvkeep.generate(one, tokenizer(), ids, KeepCache(one, **options), max_new_tokens=5).tokens


# -- copies and prices ------------------------------------------------------------------------------------


def test_a_price_lies_between_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    prices = PassPrices()
    assert prices.of(1) < prices.of(2) < prices.of(16)
    prices.note(1, 0.5)
    assert prices.of(1) == 0.5 and prices.of(5) == pytest.approx(0.5 * (1 + 4 * drafts.ROW_PRICE))
    prices.note(9, 1.5)
    assert prices.of(5) == pytest.approx(1.0) and prices.of(12) > 1.5
    prices.note(9, 0.5)
    assert 0.5 < prices.of(9) < 1.5


def test_copies_that_are_wrong_are_soon_left_out_and_noticed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    drafter, read = Copies([1, 2, 3, 4] * 30, PassPrices()), []
    for number in range(60):
        for token in (1, 2, 3, 100 + number):  # after 1, 2, 3 comes another token than before
            made, _ = drafter.copy([], 10)
            if token >= 100:
                read.append(len(made))
            drafter.learn(len(made), [token], ())
    assert sum(read[-15:]) == 0 < sum(read[:5])
