"""Drafts of a bounded cache: its answers are those of the unbounded one, token for token, whichever selector drafts."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
from cases import CASES, DRAFTING, new_cache, pairs
from families import tiny
from helpers import PROMPT, drafted, prompt, step
from transformers import AutoModelForCausalLM

from kvkeep import BudgetError, KeepCache, UsageError
from kvkeep.engine.answer import Answer
from kvkeep.engine.batch import Read
from kvkeep.engine.bounded_drafts import BoundedDrafts
from kvkeep.engine.drafts import Copies, PassPrices
from kvkeep.engine.pacing import Acceptance, Margins
from kvkeep.engine.sampling import Sampling
from kvkeep.stores.recurrent import RecurrentState

KV, RESIDUAL = "snapkv+verified, kv", "h2o+verified, residual"
WAYS = (Sampling(), Sampling(temperature=0.7, seed=3), Sampling(repetition=1.4, presence=0.5, temperature=0.5, seed=4))


def both(name: str, family: str, sampling: Sampling, new: int, copies: bool = True) -> tuple[Answer, Answer]:
    """The answers of a case and of the unbounded cache to its prompt."""
    ids = prompt(1, CASES[name].length)
    return tuple(  # type: ignore[return-value]
        drafted(tiny(family), cache, ids, new, sampling, copies)
        for cache in (new_cache(name, family), KeepCache(tiny(family)))
    )


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("name", "family", "way"),
    [
        (*pair, (number + turn) % len(WAYS))
        for turn in (1, 4)
        for number, pair in enumerate(pairs(turn, lambda case: case.drafts))
    ],
)
def test_answers_are_those_of_the_unbounded_cache(name: str, family: str, way: int) -> None:
    """Greedy, sampled, and with penalties."""
    ours, theirs = both(name, family, WAYS[way], 12)
    assert ours.tokens == theirs.tokens
    assert ours.cache.get_seq_length() == CASES[name].length + 11
    assert not ours.cache.draft_passes.active


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", DRAFTING)
def test_drafts_are_refused_and_stay_within_the_budget(name: str) -> None:
    """Were no draft refused, nothing above would show that the exact pass decides."""
    case, cache, seen = CASES[name], new_cache(name, "llama"), []

    def watch(*_: Any) -> None:
        banks = [bank for layer in cache.layers for bank in layer.resident.banks]
        held = sum(bank.keys.nbytes + bank.values.nbytes for bank in banks)
        seen.append((held + cache.memory().compressed_bytes) / cache.geometry.kv_bytes_per_token)

    sampling, new = (Sampling(0.4, seed=5), 60) if case.waits else (Sampling(0.7, seed=5), 24)
    handle = tiny("llama").register_forward_hook(watch)
    ours = drafted(tiny("llama"), cache, prompt(1, case.length), new, sampling, copies=False)
    handle.remove()
    assert ours.tokens == both("full", "llama", sampling, new)[1].tokens or case.length != CASES["full"].length
    assert ours.drafted > 0
    assert ours.accepted < ours.drafted or not case.holds  # who keeps all drafts all but exactly
    assert case.budget is not None and seen
    assert not case.holds or max(seen) <= case.budget


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
def test_an_interrupt_in_a_draft_leaves_what_was_kept(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, calls, ids = KeepCache(tiny(family), "h2o+verified:5", 20, chunk=64, checkpoint="kv"), [], prompt()
    original = cache.stream.begin_forward

    def interrupting(*arguments: Any) -> Any:
        found = original(*arguments)
        if cache.draft_passes.active:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
        return found

    monkeypatch.setattr(cache.stream, "begin_forward", interrupting)
    with pytest.raises(KeyboardInterrupt):
        drafted(tiny(family), cache, ids, 12, copies=False)
    monkeypatch.undo()
    cache.stream.abandon()
    known = cache.get_seq_length()
    assert known >= PROMPT and not cache.draft_passes.active
    whole = drafted(tiny(family), KeepCache(tiny(family)), ids, 12)
    text = torch.tensor([[*ids[0].tolist(), *whole.tokens]])
    again = drafted(tiny(family), cache, text[:, : known + 1], PROMPT + 12 - known - 1)
    assert [*text[0, PROMPT : known + 1].tolist(), *again.tokens] == whole.tokens


def test_an_interrupt_as_drafts_begin_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, calls, note = (
        KeepCache(tiny("bamba"), "h2o+verified:5", 20, chunk=64, checkpoint="kv"),
        [],
        RecurrentState.note,
    )

    def interrupting(state: RecurrentState) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        note(state)

    monkeypatch.setattr(RecurrentState, "note", interrupting)
    with pytest.raises(KeyboardInterrupt):
        drafted(tiny("bamba"), cache, prompt(), 12, copies=False)
    monkeypatch.undo()
    gc.collect()
    assert cache.draft_passes is not None and not cache.draft_passes.active
    assert not any(state.noted for state in cache.states.values())


def test_copies_of_states_are_those_of_the_budget() -> None:
    cache, seen = KeepCache(tiny("bamba"), "h2o+verified:2", 20, chunk=64, checkpoint="kv"), []
    assert cache.draft_passes is not None
    ids, note = torch.cat([prompt(1, 20)] * 3, 1), RecurrentState.note
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecurrentState, "note", lambda state: (note(state), seen.append(len(state._noted))))
        drafted(tiny("bamba"), cache, ids, 24)
    assert 1 < max(seen) <= cache.draft_passes.tail == 3


@pytest.mark.parametrize("length", [30, 56])
def test_no_pass_goes_beyond_the_length_of_its_rotary_frequencies(length: int) -> None:
    """A pass has one set of frequencies, that of its last position: tokens below the length would take the others."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 64}
    config = copy.deepcopy(tiny("phi3").config)
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    config.original_max_position_embeddings, config.max_position_embeddings = 64, 256
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config).eval()
    for seed in range(3):
        ids = prompt(1, length, seed)
        caches = KeepCache(model), KeepCache(model, "h2o+verified:12", 50, checkpoint="kv")
        assert caches[0].geometry.steady_positions == 64
        wanted, found = (drafted(model, cache, ids, 20, copies=False) for cache in caches)
        assert found.drafted and found.tokens[: 64 - length] == wanted.tokens[: 64 - length]


@pytest.mark.parametrize(
    ("spec", "given", "sentence"),
    [
        ("snapkv+verified", {"capacity": 9}, "capacity"),
        ("snapkv+verified", {"budget": 0}, "at least 4"),
        ("snapkv+verified:0", {}, "at least 1 token"),
        ("kv-direct+verified", {}, "recalls everything at every step"),
        ("snapkv+verified", {"budget": None}, "needs a budget"),
    ],
)
def test_what_cannot_draft_is_refused(spec: str, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises((UsageError, BudgetError), match=sentence):
        KeepCache(tiny("llama"), spec, **({"budget": 16} | given))


# -- its parts --------------------------------------------------------------------------------------


def test_drafts_and_the_exact_pass_share_their_noise() -> None:
    """Whatever is drafted, each token has the noise that it has without drafts."""
    scores, ids = torch.randn(6, 1, 9, generator=torch.Generator().manual_seed(1)), torch.zeros(1, 3, dtype=torch.long)
    plain, drafting = (Sampling(1.0, seed=7).sampler(0, torch.device("cpu")) for _ in range(2))
    wanted = [plain.scores(ids, one) for one in scores]
    for first in (0, 3):
        for ahead in range(2):
            assert torch.equal(drafting.draft_scores(ids, scores[first + ahead], ahead), wanted[first + ahead])
        for number in range(first, first + 3):
            assert torch.equal(drafting.scores(ids, scores[number]), wanted[number])


def drafter(seconds: float, *passes: tuple[int, float], copies: Copies | None = None) -> BoundedDrafts:
    """One whose drafts and exact passes cost these seconds."""
    cache, sampler = KeepCache(tiny("llama"), "h2o+verified:32", 128, checkpoint="kv"), Sampling()
    step("llama", cache, prompt())
    made = BoundedDrafts(cache, prompt(), sampler.sampler(0, torch.device("cpu")), copies)
    made._seconds = seconds
    for rows, price in passes:
        made.prices.note(rows, price)
    return made


def test_the_number_of_drafts_follows_their_price_and_chance() -> None:
    """Longer runs where drafts are right and exact passes dear; short ones where they are wrong."""

    def settled(accepted: int, step_s: float, pass_s: float) -> int:
        made = drafter(step_s, (1, pass_s), (33, pass_s))
        for _ in range(40):
            made.acceptance.note(accepted, 12)
        return made._count(32)

    assert settled(12, 0.05, 0.2) == 32
    assert settled(1, 0.05, 0.1) <= 3
    assert settled(6, 0.05, 2.0) > settled(6, 0.05, 0.1)


@pytest.mark.parametrize("draft_s", [0.0001, 5.0])
def test_copies_that_give_more_are_read_instead(draft_s: float) -> None:
    copies = Copies([1, 2, 3, 4] * 9, PassPrices())
    made = drafter(draft_s, (1, 0.1), (33, 0.1), copies=copies)
    for _ in range(30):
        made.acceptance.note(9, 9)
    run = made.drafts([4], 30)
    if draft_s < 1:
        assert isinstance(next(run), Read) and made.passes.active
        run.close()
        assert not made.passes.active
    else:
        with pytest.raises(StopIteration) as found:
            next(run)
        assert [*found.value.value] == ([1, 2, 3, 4] * 4)[:15]


def test_a_draft_that_is_not_sure_ends_a_run() -> None:
    """Runs may be longer if they end by themselves before a wrong draft, and their cost is that of fewer drafts."""
    ended, wrong = Acceptance(8, 1), Acceptance(8, 1)
    for _ in range(40):
        ended.note(6, 6, True)
        wrong.note(6, 7, False)
    assert ended.tokens(32) == wrong.tokens(32)
    assert ended.drafted(32) < 8 and wrong.drafted(32) > 29


def test_a_run_ends_with_a_draft_whose_margin_the_exact_pass_usually_changes_more() -> None:
    seen: list[tuple[float, bool]] = []
    ends: list[int] = []
    note, learn = Margins.note, Margins.learn

    def noted(margins: Margins, scores: torch.Tensor) -> None:
        note(margins, scores)
        best = scores.float().topk(2).values
        seen.append((float(best[0] - best[1]) - margins.usual, margins.sure))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Margins, "note", noted)
        patch.setattr(Margins, "learn", lambda *given: (ends.append(len(seen)), learn(*given)))
        drafted(tiny("llama"), new_cache(KV, "llama"), prompt(1, CASES[KV].length), 24, copies=False)
    assert seen and all(sure == (margin >= 0) for margin, sure in seen)
    assert {number + 1 for number, (_, sure) in enumerate(seen) if not sure} <= set(ends)


def test_margins_learn_from_drafts_with_right_predecessors() -> None:
    margins = Margins(logarithmic=False)
    margins.begin()
    for best, second in ((3.0, 1.0), (2.0, 1.5)):
        margins.note(torch.tensor([0.0, best, second]))
    margins.learn([torch.tensor([0.0, 3.0, 2.0]), torch.tensor([0.0, 1.0, 1.5])])  # changes: 1 and 1
    assert margins.usual == pytest.approx(1.0)
    margins.begin()
    assert margins.sure
    margins.note(torch.tensor([0.0, 1.0, 0.9]))
    assert not margins.sure
    margins.learn([torch.tensor([0.0, 3.0, 2.4])])  # 0.5
    assert margins.usual == pytest.approx(0.95)
    ratios = Margins(logarithmic=True)
    ratios.note(torch.tensor([4.0, 2.0, 0.0]))
    ratios.learn([torch.tensor([8.0, 2.0, 0.0])])
    assert ratios.usual == pytest.approx(math.log(2))
