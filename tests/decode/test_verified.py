"""Decoding in rounds: what transformers' own cache gives, token for token, whoever drafts.

Greedy decoding of one row is in the contract (``tests/test_contract.py``), for every method that drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, DRAFTING, new_cache, pairs
from conftest import WORDS, tokenizer
from families import tiny
from helpers import NEW, PROMPT, assert_near, assert_same, generate, generated, padded, prompt, step, stock
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria, StoppingCriteriaList, set_seed
from transformers.generation import StopStringCriteria

import kvkeep
from kvkeep import KeepCache, UsageError
from kvkeep.decode.lookup import Lookup
from kvkeep.decode.pace import Pace
from kvkeep.errors import BudgetError
from kvkeep.stores.round import RoundStatistics

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
        held = sum(
            part.nbytes for layer in cache.layers for bank in layer.resident.banks for part in (bank.keys, bank.values)
        )
        seen.append((held + cache.compressed_bytes()) / cache.geometry.kv_bytes_per_token)

    options = SAMPLES | ({"temperature": 0.4, "max_new_tokens": 60} if case.waits else {"max_new_tokens": 24})
    handle = tiny("llama").register_forward_hook(watch)
    try:
        ours = rounds("llama", cache, prompt(1, case.length), prompt_lookup_num_tokens=0, **options)
    finally:
        handle.remove()
    assert ours.sequences.tolist() == generated("llama", (case.length,), **options).sequences.tolist()
    assert statistics(cache).drafted > 0
    assert (
        statistics(cache).accepted < statistics(cache).drafted or not case.holds
    )  # who keeps all drafts all but exactly
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
    end = int(generated(family, (45, 36, 27)).sequences[1, PROMPT + 4])  # a token that some row comes upon
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
            if len(calls) == 5:
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


def test_a_stream_shows_committed_tokens_only() -> None:
    class Hears:
        def __init__(self) -> None:
            self.told: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.told += value.flatten().tolist()

        def end(self) -> None:
            self.told.append(-1)

    stream = Hears()
    out = rounds("llama", new_cache(KV, "llama"), prompt(), listener=stream)
    assert stream.told == [*out.sequences[0].tolist(), -1]


def test_samples_are_distributed_as_the_exact_distribution() -> None:
    """A chi-squared test at the second and third token of short samples: fair noise, whatever was drafted."""
    model, ids, draws = tiny("llama"), prompt(1, 30), 400
    counts: dict[tuple[int, ...], int] = {}
    set_seed(11)
    for _ in range(draws // 40):
        cache = KeepCache(model, "window+verified:3", 16, checkpoint="kv", where="host")
        out = model.generate(
            ids.expand(40, -1),
            attention_mask=torch.ones(40, 30, dtype=torch.long),
            past_key_values=cache,
            custom_generate=kvkeep.verified,
            do_sample=True,
            top_k=3,
            temperature=3.0,
            max_new_tokens=3,
            prompt_lookup_num_tokens=0,
        )
        for row in out[:, 30:].tolist():
            counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    expected = exact_distribution(model, ids, top=3, temperature=3.0, tokens=3)
    assert set(counts) <= set(expected)
    statistic = sum((counts.get(key, 0) - draws * p) ** 2 / (draws * p) for key, p in expected.items())
    assert statistic < 54.1  # 26 degrees of freedom: beyond by chance once in a thousand seeds; this one is set


def exact_distribution(model: Any, ids: torch.Tensor, top: int, temperature: float, tokens: int) -> dict[Any, float]:
    """The probability of each continuation, by enumeration."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        longer = {}
        for prefix, chance in found.items():
            with torch.no_grad():
                given_ids = torch.cat([ids, torch.tensor([prefix], dtype=torch.long)], 1)
                logits = model(given_ids, use_cache=False).logits[0, -1] / temperature
            best = logits.topk(top)
            for token, p in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
                longer[(*prefix, token)] = chance * p
        found = longer
    return found


class _After(StoppingCriteria):
    """Stops each row after so many tokens of its own."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= PROMPT + self.lengths[: len(input_ids)]


def test_criteria_of_ones_own_by_row() -> None:
    criteria = StoppingCriteriaList([_After([3, 8, 6])])
    ours = rounds("llama", new_cache(KV, "llama"), *padded([45, 36, 27]), stopping_criteria=criteria)
    expected = generated("llama", (45, 36, 27)).sequences
    for row, length in enumerate((3, 8, 6)):
        assert ours.sequences[row, : PROMPT + length].tolist() == expected[row, : PROMPT + length].tolist()


def test_what_cannot_be_done_is_said() -> None:
    model = tiny("llama")
    with pytest.raises(UsageError, match=r"\+verified"):
        generate("llama", KeepCache(model, "h2o", 16), prompt(), custom_generate=kvkeep.verified)
    assert KeepCache(model, "h2o", 16).round is None
    with pytest.raises(UsageError, match="Beams"):
        rounds("llama", new_cache(KV, "llama"), prompt(), num_beams=2)
    with pytest.raises(UsageError, match="output_attentions"):
        rounds("llama", new_cache(KV, "llama"), prompt(), output_attentions=True)
    with pytest.raises(UsageError, match="capacity"):
        KeepCache(model, "snapkv+verified", 16, capacity=9)
    with pytest.raises(BudgetError, match="at least 4"):
        KeepCache(model, "snapkv+verified", 0)
    with pytest.raises(UsageError, match="at least one"):
        KeepCache(model, "snapkv+verified:0", 16)
    with pytest.raises(UsageError, match="recalls everything at every step"):
        KeepCache(model, "kv-direct+verified", 16)
    with pytest.raises(UsageError, match="needs a budget"):
        KeepCache(model, "snapkv+verified")


def test_uneven_rows_take_no_further_text() -> None:
    cache, end = new_cache(RESIDUAL, "llama"), int(generated("llama", (45, 36, 27)).sequences[0, PROMPT + 2])
    out = rounds("llama", cache, *padded([45, 36, 27]), eos_token_id=end)
    assert len({int((row != 0).sum()) for row in out.sequences[:, PROMPT:]}) > 1
    with pytest.raises(UsageError, match="reset"):
        step("llama", cache, torch.tensor([[5], [5], [5]]))


def test_a_recall_may_be_an_argument() -> None:
    assert KeepCache(tiny("llama"), budget=16, recall="verified").method.name == "snapkv+verified"
    assert KeepCache(tiny("llama"), "h2o", 16, recall="verified:3").method.name == "h2o+verified:3"


def test_a_session_goes_on_in_rounds(tmp_path: Path) -> None:
    talk = kvkeep.Conversation(tiny("llama"), tokenizer(), new_cache(KV, "llama"))
    plain = kvkeep.Conversation(tiny("llama"), tokenizer(), KeepCache(tiny("llama")))
    for question in ("the man was here", "and then"):
        assert talk.answer(question, max_new_tokens=9).tokens == plain.answer(question, max_new_tokens=9).tokens
        talk.save(tmp_path / "talk")
        talk = kvkeep.Conversation.resume(tiny("llama"), tokenizer(), tmp_path / "talk")
    result = talk.answer("who was it", max_new_tokens=9)
    assert result.tokens == plain.answer("who was it", max_new_tokens=9).tokens
    assert result.rounds is not None and result.exactness == "exact"


# -- its parts --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=4, max_size=40), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_lookup_copies_what_followed_last_time(tokens: list[int], length: int) -> None:
    """Against a search from the end, which copies token by token and so repeats what it has just written."""
    expected: list[int] = []
    for place in range(len(tokens) - 1, 2, -1):
        if tokens[place - 3 : place] == tokens[-3:]:
            for number in range(length):
                source = place + number
                expected.append(tokens[source] if source < len(tokens) else expected[source - len(tokens)])
            break
    assert Lookup(tokens).run(length) == expected


def test_pace_follows_acceptance_and_costs() -> None:
    """Longer runs where drafts are right and exact passes dear; short ones where they are wrong."""

    def settled(accepted: int, step_s: float, pass_s: float) -> int:
        pace = Pace()
        for _ in range(40):
            pace.drafts.note(accepted, 12)
            pace.took(12, 12 * step_s, pass_s)
        return pace.length(32)

    assert settled(12, 0.05, 0.2) == 32
    assert settled(1, 0.05, 0.1) <= 3
    assert settled(6, 0.05, 2.0) > settled(6, 0.05, 0.1)
    pace = Pace()
    assert pace.length(32) == 8 and not pace.prefers_copies(24, 8)  # nothing is known yet
    pace.took(8, 0.4, 0.1)
    for _ in range(9):
        pace.copies.note(24, 24)
    assert pace.prefers_copies(24, 8)
    for _ in range(30):
        pace.copies.note(0, 24)
        pace.drafts.note(8, 8)
    assert not pace.prefers_copies(24, 8)


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


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_a_budget_in_bytes_holds_after_rounds_beside_sliding_windows(family: str) -> None:
    cache = KeepCache(tiny(family), "snapkv+verified", "24KB", checkpoint="kv", where="host")
    generate(family, cache, prompt(1, 45), custom_generate=kvkeep.verified)
    held = cache.memory()
    assert held.resident_bytes + held.compressed_bytes <= 24_000
