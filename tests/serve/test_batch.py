"""A packed pass gives each cache what a pass of its own gives: every method, every family.

One half of all methods together on a family of full attention, the other half on one of windows and shared layers. A
packed pass hands each cache its own queries, keys and values, so on the others a method meets one family, beside one
method of each kind that meets them all. Another KVKEEP_TURN changes the halves and the families.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import CASES, RECURRENT, TURN, pairs, taken
from conftest import tokenizer
from families import FAMILIES, tiny
from helpers import NEW, answered, assert_near, prompt
from torch import Tensor

from kvkeep import KeepCache, KvkeepError
from kvkeep.engine.answer import Answer, Ask, Scheduler
from kvkeep.engine.batch import Read, can_pack, forward
from kvkeep.engine.sampling import Sampling
from kvkeep.models.binding import bind
from kvkeep.models.loading import load
from kvkeep.models.packed import row_independent

STEPS = 2
TIES = ("qwen3", "qwen3_moe", "gemma3", "gemma4", "deepseek_v3")
"""Families whose keys are normed, so that knorm's order hangs on the last bit."""
WITH_HALF = ("llama", "gemma4")
EVERYWHERE = ("full", "paged", "residual", "h2o+verified, residual", "h2o", "h2o+merge", "quantized")


def parts(cache: KeepCache, length: int, seed: int) -> list[tuple[list[int], bool]]:
    """A prompt in chunks as the cache cuts it, then single tokens; and whether more of the text follows."""
    ids = prompt(1, length + STEPS, seed)[0].tolist()
    stops = list(range(length, 0, -min(cache.stream.chunk, length)))[::-1]
    cut = [(ids[start:stop], stop < length) for start, stop in zip([0, *stops], stops, strict=False)]
    return cut + [([one], False) for one in ids[length:]]


@torch.no_grad()
def alone(model: Any, cache: KeepCache, ids: list[int], cut: bool) -> Tensor:
    cache.stream.record.expect_more(cut)
    try:
        return model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True).logits[0, -1]
    finally:
        cache.stream.record.expect_more(False)


def compared(model: Any, made: list[tuple[str, Any, int]]) -> list[tuple[str, Tensor, Tensor]]:
    """Read texts through caches, one after the other joining; return the last logits of each, together and alone."""
    caches = [make() for _, make, _ in made]
    texts = [
        parts(cache, length, number) for number, (cache, (_, _, length)) in enumerate(zip(caches, made, strict=True))
    ]
    together: list[list[Tensor]] = [[] for _ in made]
    turn = 0
    while any(texts):
        now = [number for number, text in enumerate(texts) if text and number <= turn]
        reads = [Read(caches[number], *_read(texts[number].pop(0))) for number in now]
        for number, found in zip(now, forward(model, reads), strict=True):
            if isinstance(found, Exception):
                raise found
            together[number] += [*found]
        turn += 1
    result = []
    for number, (name, make, length) in enumerate(made):
        cache = make()
        given = [alone(model, cache, *part) for part in parts(cache, length, number)]
        result.append((name, torch.stack(together[number]), torch.stack(given)))
    return result


def _read(part: tuple[list[int], bool]) -> tuple[list[int], int, bool]:
    return part[0], 1, part[1]


def made(model: Any, name: str) -> Any:
    case = CASES[name]
    own = {"method": case.spec, "budget": case.budget, **case.options}
    return lambda: KeepCache(model, **(own if case.chunk is None else {"chunk": case.chunk, **own}))


def test_a_family_whose_recurrent_modules_are_not_known_shares_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KeepCache(tiny("bamba"))
    assert can_pack(cache)
    monkeypatch.setattr(bind(tiny("bamba")), "recurrent", {})
    assert not can_pack(cache)


@pytest.mark.turns(9)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_reads_beside_all_others_as_alone(family: str) -> None:
    model = tiny(family)
    halves = [name for row, name in enumerate(CASES) if (row + TURN) % 2 == (family == WITH_HALF[1])]
    own = halves if family in WITH_HALF else [name for name, its in pairs(10, everywhere=EVERYWHERE) if its == family]
    names = [name for name in own if taken(name, family) and not ("knorm" in name and family in TIES)]
    packed = [name for name in names if can_pack(made(model, name)())]
    assert len(packed) >= (30 if family in WITH_HALF else 2)
    lengths = [CASES[name].length - number % 7 for number, name in enumerate(packed)]
    every = [(name, made(model, name), length) for name, length in zip(packed, lengths, strict=True)]
    for name, found, wanted in compared(model, every):
        within = 1e-2 if CASES[name].waits else 1e-3  # a number at a border gets one code or the other
        assert (found - wanted).abs().max() < within, name


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["llama", "gemma3", "bamba", "lfm2", "gpt_oss"])
def test_with_the_kernels_logits_have_the_bits_of_each_alone(family: str, tmp_path: Path) -> None:
    tiny(family).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model = load(tmp_path, weights="bfloat16", device="cpu").model
    if family not in RECURRENT and not row_independent(model):  # it never says so of torch's convolutions
        pytest.skip("products of this machine depend on the number of rows")
    specs = [("full", None), ("kv-direct", 20), ("h2o", 20), ("revive", 80), ("snapkv", 40), ("h2o+checkpoint", 20)]
    every = [
        (spec, partial(KeepCache, model, spec, budget, **({"chunk": 16} if budget else {})), 60 + number)
        for number, (spec, budget) in enumerate(specs)
    ]
    for name, found, wanted in compared(model, every):
        assert torch.equal(found, wanted), name


def test_a_read_that_fails_leaves_its_cache_as_it_was_and_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    good, bad = KeepCache(model, "h2o", 16, chunk=16), KeepCache(model, "snapkv", 16, chunk=16)
    first, second = prompt(1, 12, 1)[0].tolist(), prompt(1, 12, 2)[0].tolist()
    forward(model, [Read(good, first), Read(bad, second)])
    own = bad.stream.attend

    def broken(module: Any, *given: Any) -> Tensor:
        if module.layer_idx == 2:
            raise RuntimeError("no")
        return own(module, *given)

    monkeypatch.setattr(bad.stream, "attend", broken)
    monkeypatch.setattr(bad.stream, "plan", lambda *given: {})  # all of its layers attend so
    found, error = forward(model, [Read(good, [5]), Read(bad, [6])])
    assert isinstance(found, Tensor) and isinstance(error, RuntimeError)
    (error,) = forward(model, [Read(bad, [6])])
    assert isinstance(error, RuntimeError)
    monkeypatch.undo()
    assert bad.get_seq_length() == 12
    again = forward(model, [Read(bad, [6])])[0]
    fresh = KeepCache(model, "snapkv", 16, chunk=16)
    alone(model, fresh, second, False)
    assert_near(again[-1], alone(model, fresh, [6], False), 1e-4)
    control = KeepCache(model, "h2o", 16, chunk=16)
    alone(model, control, first, False)
    assert_near(found[-1], alone(model, control, [5], False), 1e-4)


@pytest.mark.parametrize("family", RECURRENT)
def test_rounds_beside_other_answers_write_what_transformers_does(family: str) -> None:
    """In a pass, one session verifies several tokens while the others read one or a chunk."""
    model, answers = tiny(family), list[tuple[Answer, Tensor]]()
    scheduler = Scheduler(model)
    for number, (method, budget) in enumerate((("h2o+verified:4", 20), ("full", None), ("kv-direct", 20))):
        ids = prompt(1, 45 + number, number + 1)
        ask = Ask(ids[0].tolist(), NEW, Sampling(temperature=0))
        answer = Answer(ask, KeepCache(model, method, budget), tokenizer(), [], None)
        scheduler.add(answer)
        answers.append((answer, ids))
    while scheduler.answers:
        for result in scheduler.step():
            if result.scheduled.give(result.logits):
                scheduler.remove(result.scheduled)
    for answer, ids in answers:
        assert answer.tokens == answered(family, ids).sequences[0, ids.shape[1] :].tolist()


def test_a_recurrent_module_that_fails_for_one_session_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = tiny("bamba"), prompt(1, 13)[0].tolist()
    good, bad, control = (KeepCache(model) for _ in range(3))
    forward(model, [Read(good, text[:12]), Read(bad, text[:12])])
    alone(model, control, text[:12], False)
    with monkeypatch.context() as patch:
        patch.setattr(bad.stream, "recur", Mock(side_effect=RuntimeError("no")))
        found, error = forward(model, [Read(good, text[12:]), Read(bad, text[12:])])
    assert isinstance(found, Tensor) and isinstance(error, RuntimeError)
    assert_near(found[-1], alone(model, control, text[12:], False), 1e-4)
    (error,) = forward(model, [Read(bad, text[12:])])
    assert isinstance(error, KvkeepError) and "a recurrent state cannot be rolled back" in str(error)
