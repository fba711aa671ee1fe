"""Decoding in rounds: what transformers' own cache gives, token for token, whoever drafts.

Greedy decoding of one row is in the contract (``tests/test_contract.py``), for every method that drafts.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import CASES, DRAFTING, new_cache, pairs
from conftest import WORDS, tokenizer
from families import tiny
from helpers import NEW, PROMPT, assert_near, assert_same, generate, generated, padded, prompt, step, stock
from transformers import StoppingCriteriaList
from transformers.generation import StopStringCriteria

import kvkeep
from kvkeep import KeepCache, UsageError
from kvkeep.engine.pacing import Margins, Pace
from kvkeep.errors import BudgetError
from kvkeep.stores.readers.round import RoundStatistics

SAMPLES = {"do_sample": True, "temperature": 0.7, "top_k": 0}
KV, RESIDUAL = "snapkv+verified, kv", "h2o+verified, residual"
SOME = [(name, family) for family in ("llama", "gemma3") for name in (KV, RESIDUAL, "tova+verified, tokens")]


def rounds(family: str, cache: Any, ids: Any, mask: Any = None, **options: Any) -> Any:
    return generate(family, cache, ids, mask, custom_generate=kvkeep.verified, **options)


def statistics(cache: KeepCache) -> RoundStatistics:
    assert cache.round is not None and cache.round.statistics is not None
    return cache.round.statistics


@pytest.mark.parametrize(
    ("name", "family", "way"),
    [
        (*pair, (number + turn) % 3)
        for turn in (1, 4)
        for number, pair in enumerate(pairs(turn, lambda case: case.drafts))
    ],
)
def test_batches_and_samples_equal_stock(name: str, family: str, way: int) -> None:
    """A left-padded batch, greedily and sampled, and one row sampled. Rows accept different numbers of drafts, and stay
    apart all the same; draft and exact pass share their noise, drawn as transformers draws it."""
    length, cache = CASES[name].length, new_cache(name, family)
    lengths = (length,) if way == 1 else (length, length - 9, length - 18)
    options = {} if way == 0 else SAMPLES
    ours = rounds(family, cache, *padded(list(lengths)), **options)
    assert_same(ours, generated(family, lengths, **options))
    assert cache.get_seq_length() >= length + NEW - 1
    assert 0 < statistics(cache).rounds <= NEW * len(lengths)


@pytest.mark.parametrize("name", DRAFTING)
def test_drafts_are_refused_and_sampling_is_stock_without_copies_too(name: str) -> None:
    """The budget holds within a round: drafts and what is being verified lie within it, in every layer at every
    pass. Were no draft refused, nothing above would show that the exact pass decides."""
    case, cache, seen = CASES[name], new_cache(name, "llama"), []

    def watch(*_: Any) -> None:
        banks = [bank for layer in cache.layers for bank in layer.resident.banks]
        held = sum(bank.keys.nbytes + bank.values.nbytes for bank in banks)
        seen.append((held + cache.memory().compressed_bytes) / cache.geometry.kv_bytes_per_token)

    options = SAMPLES | ({"temperature": 0.4, "max_new_tokens": 60} if case.waits else {"max_new_tokens": 24})
    handle = tiny("llama").register_forward_hook(watch)
    ours = rounds("llama", cache, prompt(1, case.length), prompt_lookup_num_tokens=0, **options)
    handle.remove()
    assert ours.sequences.tolist() == generated("llama", (case.length,), **options).sequences.tolist()
    assert statistics(cache).drafted > 0
    all_kept = statistics(cache).accepted == statistics(cache).drafted
    assert not all_kept or not case.holds  # who keeps all drafts all but exactly
    assert case.budget is not None and seen
    assert not case.holds or max(seen) <= case.budget


@pytest.mark.parametrize(("name", "family"), SOME)
def test_logits_processors_see_what_stock_shows_them(name: str, family: str) -> None:
    options = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 3, "output_scores": True}
    ours = rounds(family, new_cache(name, family), *padded([45, 36]), **options)
    theirs = generated(family, (45, 36), **options)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for mine, yours in zip(ours.scores, theirs.scores, strict=True):
        assert_near(mine, yours)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_rows_that_end_earlier(family: str) -> None:
    """An end of text in mid-run ends its row there, pads it, and lets the others go on."""
    end = int(generated(family, (45, 36, 27)).sequences[1, PROMPT + 1])  # a token that some row comes upon
    theirs = generated(family, (45, 36, 27), eos_token_id=end)
    ours = rounds(family, new_cache(KV, family), *padded([45, 36, 27]), eos_token_id=end)
    assert ours.sequences.tolist() == theirs.sequences.tolist()


def test_an_interrupt_in_a_round_leaves_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, calls = new_cache(KV, "gemma3"), []
    assert cache.stream is not None and cache.round is not None
    original = cache.stream.begin_forward

    def interrupting(*arguments: Any) -> Any:
        if cache.round.drafting:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(cache.stream, "begin_forward", interrupting)
    with pytest.raises(KeyboardInterrupt):
        rounds("gemma3", cache, prompt(), prompt_lookup_num_tokens=0)
    monkeypatch.undo()
    known = cache.get_seq_length()
    assert known >= PROMPT
    text = generated("gemma3", (PROMPT,)).sequences
    again = rounds("gemma3", cache, text[:, : known + 1])
    assert again.sequences[:, : PROMPT + NEW].tolist() == text.tolist()


def test_criteria_of_ones_own_by_row() -> None:
    lengths = torch.tensor([3, 8, 6])
    stop: Any = lambda ids, scores, **_: ids.shape[1] >= PROMPT + lengths[: len(ids)]  # noqa: E731
    ours = rounds(
        "llama", new_cache(KV, "llama"), *padded([45, 36, 27]), stopping_criteria=StoppingCriteriaList([stop])
    )
    expected = generated("llama", (45, 36, 27)).sequences
    for row, length in enumerate(lengths.tolist()):
        assert ours.sequences[row, : PROMPT + length].tolist() == expected[row, : PROMPT + length].tolist()


@pytest.mark.parametrize(
    ("spec", "given", "sentence"),
    [
        ("h2o", {}, r"\+verified"),
        ("snapkv+verified", {"num_beams": 2}, "Beam search"),
        ("snapkv+verified", {"output_attentions": True}, "output_attentions"),
        ("snapkv+verified", {"capacity": 9}, "capacity"),
        ("snapkv+verified", {"budget": 0}, "at least 4"),
        ("snapkv+verified:0", {}, "at least 1 token"),
        ("kv-direct+verified", {}, "recalls everything at every step"),
        ("snapkv+verified", {"budget": None}, "needs a budget"),
    ],
)
def test_what_cannot_be_done_is_said(spec: str, given: dict[str, Any], sentence: str) -> None:
    own = {"budget": 16} | {name: given[name] for name in given if name in ("budget", "capacity")}
    with pytest.raises((UsageError, BudgetError), match=sentence):
        rounds("llama", KeepCache(tiny("llama"), spec, **own), prompt(), **dict(given.items() - own.items()))


def test_uneven_rows_take_no_further_text() -> None:
    cache, end = new_cache(RESIDUAL, "llama"), int(generated("llama", (45, 36, 27)).sequences[0, PROMPT + 2])
    out = rounds("llama", cache, *padded([45, 36, 27]), eos_token_id=end)
    assert len({int((row != 0).sum()) for row in out.sequences[:, PROMPT:]}) > 1
    with pytest.raises(UsageError, match="reset"):
        step("llama", cache, torch.tensor([[5], [5], [5]]))


# -- its parts --------------------------------------------------------------------------------------


def test_pace_follows_acceptance_and_costs() -> None:
    """Longer runs where drafts are right and exact passes dear; short ones where they are wrong."""

    def settled(accepted: int, step_s: float, pass_s: float) -> int:
        pace = Pace()
        for _ in range(40):
            pace.drafts.note(accepted, 12)
            pace.record(12, 12 * step_s, pass_s)
        return pace.length(32)

    assert settled(12, 0.05, 0.2) == 32
    assert settled(1, 0.05, 0.1) <= 3
    assert settled(6, 0.05, 2.0) > settled(6, 0.05, 0.1)
    pace = Pace()
    assert pace.length(32) == 8 and not pace.prefers_copies(24, 8)  # nothing is known yet
    pace.record(8, 0.4, 0.1)
    for _ in range(9):
        pace.copies.note(24, 24)
    assert pace.prefers_copies(24, 8)
    for _ in range(30):
        pace.copies.note(0, 24)
        pace.drafts.note(8, 8)
    assert not pace.prefers_copies(24, 8)


def test_pace_knows_that_a_draft_that_is_not_sure_ends_a_run() -> None:
    """Runs may be longer if they end by themselves before a wrong draft, and their cost is that of fewer drafts."""

    def settled(unsure: bool) -> Pace:
        pace = Pace()
        for _ in range(40):
            pace.drafts.note(6, 6 if unsure else 7, unsure)
            pace.record(7, 7 * 0.05, 0.3)
        return pace

    ended, wrong = settled(True), settled(False)
    assert ended.length(32) == 32 > wrong.length(32)
    assert ended.drafts.tokens(32) == wrong.drafts.tokens(32)
    assert ended.drafts.drafted(32) < 8 and wrong.drafts.drafted(32) > 29


def test_a_run_of_drafts_ends_with_one_whose_margin_the_exact_pass_usually_changes_more() -> None:
    cache = new_cache(KV, "llama")
    seen: list[tuple[float, bool]] = []
    note, learn = Margins.note, Margins.learn

    def noted(margins: Margins, scores: torch.Tensor) -> None:
        note(margins, scores)
        best = scores.float().topk(2).values[0]
        seen.append((float(best[0] - best[1]) - margins.usual, margins.sure_in([True])))

    ends: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Margins, "note", noted)
        patch.setattr(Margins, "learn", lambda *given: (ends.append(len(seen)), learn(*given)))
        rounds("llama", cache, prompt(1, CASES[KV].length), prompt_lookup_num_tokens=0)
    assert seen and all(sure == (margin >= 0) for margin, sure in seen)
    assert {number + 1 for number, (_, sure) in enumerate(seen) if not sure} <= set(ends)


def test_margins_learn_from_drafts_with_right_predecessors() -> None:
    margins = Margins(logarithmic=False)
    margins.begin()
    for best, second in ((3.0, 1.0), (2.0, 1.5)):
        margins.note(torch.tensor([[0.0, best, second], [0.0, best, second]]))
    exact = torch.tensor([[[0.0, 3.0, 2.0], [0.0, 1.0, 1.5]], [[0.0, 3.5, 1.0], [0.0, 9.0, 1.0]]])
    margins.learn(exact, [2, 1])  # changes: 1 and 1 in the first row, 0.5 in the second
    assert margins.usual == pytest.approx(2.5 / 3)
    margins.begin()
    assert margins.sure_in([True, True])
    margins.note(torch.tensor([[0.0, 1.0, 0.9], [0.0, 2.0, 0.0]]))
    assert margins.sure_in([True, True]) and margins.sure_in([False, True]) and not margins.sure_in([True, False])
    ratios = Margins(logarithmic=True)
    ratios.note(torch.tensor([[4.0, 2.0, 0.0]]))
    ratios.learn(torch.tensor([[[8.0, 2.0, 0.0]]]), [1])
    assert ratios.usual == pytest.approx(math.log(2))


def test_stop_strings_end_a_run_of_rounds() -> None:
    """transformers loses generate(tokenizer=...) on the way to a custom_generate, but not a criterion."""
    words = tokenizer()
    words.add_tokens(["abcdef"])  # by which transformers finds out what tokens are as text
    free = generate("llama", stock("llama"), prompt(), max_new_tokens=24).sequences
    known = [word for word in words.convert_ids_to_tokens(free[0, PROMPT + 4 : -4].tolist()) if word in WORDS]
    stop = StoppingCriteriaList([StopStringCriteria(words, [max(known, key=len)])])
    ours, theirs = (
        generate("llama", cache, prompt(), max_new_tokens=24, stopping_criteria=stop, **options).sequences
        for cache, options in ((new_cache(KV, "llama"), {"custom_generate": kvkeep.verified}), (stock("llama"), {}))
    )
    assert PROMPT < ours.shape[1] < free.shape[1] and torch.equal(ours, theirs)
