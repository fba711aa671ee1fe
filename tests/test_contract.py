"""The contract: what every method promises on every family.

What equals the unbounded cache is held against transformers' own. For the others it is what must be so all the same:
the budget holds at every moment, rows do not see each other, whatever is done to rows and tokens leaves a sound cache,
bytes are those of tensors, and a cache goes on as it would have wherever it is taken.

Each property is held against every method, on a family that is another one for each method and each property (and for
each KVKEEP_TURN in the environment, a number); a few methods of each kind meet all families.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    ALL,
    CASES,
    DRAFTING,
    ELSEWHERE,
    EXACT,
    LOSSY,
    ONE_WAY,
    RECURRENT,
    Case,
    covering_names,
    handed_on,
    new_cache,
    pairs,
    taken,
)
from families import FAMILIES, tiny
from helpers import (
    NEW,
    allocated,
    answered,
    assert_near,
    assert_same,
    bounded,
    broken,
    counted,
    drafted,
    expected,
    generate,
    generated,
    padded,
    prompt,
    read,
    slots_of,
    step,
)

import kvkeep
from kvkeep import EntryState, KeepCache, Session, UnsupportedModelError, UsageError, load_session, save_session
from kvkeep.policies.methods import parts

# Where a norm follows the projection, all keys of a fresh model are as long, but for rounding: "knorm" is then a throw
# of dice that falls otherwise in another batch.
NORMED = [
    (name, family)
    for name in ("knorm", "knorm+residual:3", "knorm+kv+verified")
    for family in ("gemma3", "gemma4", "deepseek_v3", "qwen3", "qwen3_moe", "qwen3_next")
]


def equals(case: Case) -> bool:
    return case.equals


def differs(case: Case) -> bool:
    return not case.equals


def streams(case: Case) -> bool:
    return not case.method.selector.keeps_all


def by_head(case: Case) -> bool:
    """Whether a selector chooses, of entries that lie in banks."""
    return not case.method.selector.keeps_all and not case.method.selector.in_order


# -- the list -----------------------------------------------------------------------------------------


def test_every_method_and_every_part_is_in_the_list() -> None:
    made = [case.method for case in CASES.values()]
    for name, method in kvkeep.methods().items():
        own = [type(part) for part in (method.selector, method.fate, method.recall)]
        same = [other for other in made if [type(part) for part in (other.selector, other.fate, other.recall)] == own]
        assert same, f"no case of '{name}' in tests/cases.py"
    there = {type(part) for method in made for part in (method.selector, method.fate, method.recall)}
    for kind, registered in parts().items():
        for name, part in registered.items():
            assert part in there or name in ELSEWHERE, f"no case with '{name}' of the {kind} in tests/cases.py"


def test_every_case_keeps_its_word_on_every_family() -> None:
    """What it promises, and that families it does not work on are refused by name."""
    for name, case in CASES.items():
        assert case.method.exactness == case.promise, name
        for family in ALL:
            if not taken(name, family):
                with pytest.raises(UnsupportedModelError, match=tiny(family).config.model_type):
                    new_cache(name, family)


# -- what holds at every moment -------------------------------------------------------------------------


def limits(cache: KeepCache, index: int, lanes: int) -> list[int]:
    """The entries that each lane of a layer may have."""
    assert cache.budgets is not None
    own = list(cache.budgets[index])
    return own * (lanes if len(own) == 1 else lanes // len(own))


def assert_sound(cache: KeepCache, case: Case) -> None:
    """What holds after every chunk and token, for every layer and lane, whatever was done before."""
    layers = bounded(cache)
    if case.budget is not None and layers:
        held = sum(layer.resident_bytes for layer in layers) + (cache.memory().compressed_bytes if case.holds else 0)
        assert held <= cache.rows * case.budget * cache.geometry.full_bytes_per_token
    for layer in layers:
        assert layer.pending is None and layer.arrived == cache.get_seq_length()
        if cache.budgets is None:
            continue
        lanes, tail = slots_of(layer), layer.resident.banks.tail
        for slots, limit in zip(lanes, limits(cache, layer.index, len(lanes)), strict=True):
            assert len(slots) == len(set(slots)) <= limit
            assert all(slot < layer.length for slot in slots)
        for bank in layer.resident.banks:
            columns = bank.columns + tail if bank.columns else 0
            assert bank.keys.shape[:2] == bank.values.shape[:2] == (bank.slots.shape[0], columns)
            assert (bank.slots[:, bank.used :] < 0).all()
            assert bank.gaps >= int((bank.slots[:, : bank.used] < 0).sum(1).max()) if bank.used else True
        flags = layer.resident.resident_slots()
        assert flags.shape == (len(lanes), layer.length)
        assert [own.nonzero().flatten().tolist() for own in flags] == [sorted(slots) for slots in lanes]


def watched(cache: KeepCache, case: Case) -> list[int]:
    """Check the cache after every chunk and every token; return the lengths at which that was done."""
    lengths: list[int] = []

    def check(length: int) -> None:
        assert_sound(cache, case)
        lengths.append(length)

    cache.stream.record.tell(check)
    return lengths


def chunks(cache: KeepCache, length: int) -> list[int]:
    """The lengths at which a prompt is cut: what does not divide comes first."""
    return list(range(length % cache.stream.chunk or cache.stream.chunk, length + 1, cache.stream.chunk))


def assert_accounts(cache: KeepCache, case: Case, padding: list[int]) -> None:
    """Bytes are those of tensors, descriptions those of layers, and every entry is where it is said to be; ``padding``:
    slots of each row."""
    assert counted(cache) == allocated(cache)
    assert cache.memory().peak_cache_bytes >= cache.memory().resident_bytes
    assert cache.exactness == case.keeps
    for report, layer in zip(cache.describe(), cache.geometry.layers, strict=True):
        if layer.kind == "full":
            requested = "none" if case.budget is None else str(case.budget)
            assert (report.requested, report.effective, report.requested_budget) == (case.spec, case.spec, requested)
            assert report.exactness == case.keeps and (report.entries is not None or not by_head(case))
        else:
            assert report.note
    found, length, rows = cache.entry_states(), cache.get_seq_length(), len(padding)
    real = torch.arange(length) >= torch.tensor(padding)[:, None, None]
    for own, codes in zip(cache.geometry.layers, found, strict=True):
        assert codes.shape[0] == rows and codes.shape[2] == length and codes.dtype == torch.int8
        if own.kind == "full":
            assert codes.shape[1] == cache.layers[own.index].heads if streams(case) else True
            assert_states(cache.layers[own.index], case, codes, real.expand_as(codes))


def assert_states(layer: Any, case: Case, codes: torch.Tensor, real: torch.Tensor) -> None:
    """Codes of a layer's entries; ``real``: which of them are no padding."""
    if case.becomes == EntryState.RESIDENT:
        assert (codes == EntryState.RESIDENT).all()
        return
    here, held = codes == EntryState.RESIDENT, layer.resident.resident_slots()
    alone = layer.resident.resident_slots(unmerged=True).expand(codes.flatten(0, 1).shape).view_as(codes)
    assert (alone <= here).all() and ((here <= alone).all() or case.waits)
    assert ((codes == case.becomes) & real).any()
    others = [EntryState.CHECKPOINTED] if case.backed else [EntryState.DROPPED] if case.loses else []
    allowed = torch.tensor([EntryState.RESIDENT, case.becomes, *others], dtype=codes.dtype)
    assert torch.isin(codes[real], allowed).all()
    if by_head(case):
        assert (codes[~real] != EntryState.RESIDENT).all() and not held.view_as(codes)[~real].any()
    if not case.spec.startswith(("random", "knorm", "keydiff", "tova")) and case.budget:
        assert held[:, -1].all()


# -- a text, and rows of a batch --------------------------------------------------------------------------

# One of each way to keep, rebuild, choose, merge and recall, which meets every family. What comes back as it was kept
# ("kv", "h2o+kv") and what is rebuilt over several layers ("residual:3") do so where a step is taken again.
EVERYWHERE = ("full", "residual", "tokens", "h2o+verified, residual", "snapkv", "kvslimmer")


@pytest.mark.turns(5)
@pytest.mark.parametrize(("name", "family"), pairs(0, everywhere=EVERYWHERE))
def test_a_text_is_answered_in_two_turns_and_after_a_reset_again(name: str, family: str) -> None:
    """Greedily, by transformers' own generate(), or by the engine where the method drafts. A reset forgets everything,
    and then, without a mask of ones, all is the same to the bit."""
    case, cache, conversation = CASES[name], new_cache(name, family), prompt(1, CASES[name].length)
    lengths, answers = watched(cache, case), []
    for turn in range(2):
        answer = drafted(tiny(family), cache, conversation) if case.drafts else generate(family, cache, conversation)
        answers.append(answer)
        assert cache.get_seq_length() == conversation.shape[1] + NEW - 1
        if case.equals:
            assert_same(answers[-1], answered(family, conversation))
        else:
            assert all(logits.isfinite().all() for logits in answers[-1].logits)
        if not turn:
            begin = chunks(cache, case.length)
            assert lengths[: len(begin)] == begin
            assert case.drafts or lengths == [*begin, *range(case.length + 1, case.length + NEW)]
        assert_accounts(cache, case, [0])
        conversation = torch.cat([answers[-1].sequences, prompt(1, 7)], 1)
    cache.reset()
    assert cache.get_seq_length() == cache.memory().resident_bytes == cache.memory().compressed_bytes == 0
    for place in range(1 if case.drafts else 2):
        tokens = conversation[:, case.length + place - 1 : case.length + place] if place else prompt(1, case.length)
        assert torch.equal(step(family, cache, tokens)[:, -1], answers[0].logits[place])


@pytest.mark.turns(4)
@pytest.mark.parametrize(("name", "family"), pairs(1, everywhere=("h2o", "h2o+pages:1", "h2o+merge", "h2o+quantize:8")))
def test_rows_of_a_padded_batch_are_what_they_are_alone(name: str, family: str) -> None:
    """Padded by whole chunks, so that each row's own tokens are taken in the same pieces as without padding."""
    case, cache = CASES[name], new_cache(name, family)
    lengths = [length + NEW for length in case.lengths]
    padding = [lengths[0] - length for length in lengths]
    ids, mask = padded(lengths)
    progress = watched(cache, case)
    batch = read(family, cache, ids, mask)
    assert cache.get_seq_length() == lengths[0]
    assert progress == [*chunks(cache, case.length), *range(case.length + 1, lengths[0] + 1)]
    assert_accounts(cache, case, padding)
    if case.equals:
        assert_near(batch, expected(family, ids, mask)[:, -NEW - 1 :])
        return
    for layer in bounded(cache):  # the budget is used: rows longer than it fill it
        lanes = slots_of(layer)
        slack = getattr(layer.evicted, "slack", 1) - 1  # where neighbours merge there is room for a while
        for lane, (slots, limit) in enumerate(zip(lanes, limits(cache, layer.index, len(lanes)), strict=True)):
            limit = min(limit, lengths[lane // layer.heads])
            assert limit - slack <= len(slots) <= limit
    if (name, family) in NORMED:
        return
    if case.alone == "":
        others = torch.cat([ids[:1].flip(1), ids[1:]])
        again = read(family, new_cache(name, family), others, mask)
        assert_near(again[1:], batch[1:])
        assert (again[0] - batch[0]).abs().max() > 0.1
        return
    row = (list(CASES).index(name) + list(FAMILIES).index(family)) % 3
    own = slice(row, row + 1)
    alone = (ids[own], mask[own]) if case.alone == "padded" else (ids[own, padding[row] :], None)
    assert_near(batch[own], read(family, new_cache(name, family), *alone))


@pytest.mark.turns(5)
@pytest.mark.parametrize("name", covering_names((name for name, case in CASES.items() if not case.drafts), 2))
def test_every_method_runs_beside_every_kind_of_recurrent_state(name: str) -> None:
    """Two rows, one of them padded, of which the states hold nothing."""
    case = CASES[name]
    ids, mask = padded([case.length + 1, case.length - 7])
    for family in RECURRENT:
        if not taken(name, family):
            continue
        cache = new_cache(name, family)
        ours = read(family, cache, ids, mask, 1)
        if case.equals:
            assert_near(ours, expected(family, ids, mask)[:, -2:])
        assert_accounts(cache, case, [0, 8])
        states = [state.state() for state in cache.made.states.values()]
        assert sum(one.nbytes for state in states for one in state.values()) == 2 * cache.geometry.recurrent_bytes()


@pytest.mark.turns(2)
@pytest.mark.parametrize(("name", "family"), [pair for pair in pairs(2, differs) if pair not in NORMED])
def test_a_padded_row_generates_what_it_does_alone(name: str, family: str) -> None:
    """Padded by any number of slots, where the whole prompt is taken at once."""
    case = CASES[name]
    if not case.alone:
        pytest.skip("what leaves is kept by groups that other rows' padding moves")
    lengths, room = [45, 38, 21], {"budget": 48, "chunk": 45 if "streaming-llm:sinks" in case.spec else 48}
    if case.method.fate.hook() is not None:  # it reads ahead: the prompt stays whole
        room = {"budget": 51, "chunk": 45}
    ids, mask = padded(lengths)
    batch = generate(family, new_cache(name, family, **room), ids, mask)
    row = 1 + list(CASES).index(name) % 2
    own = slice(row, row + 1)
    given = (ids[own], mask[own]) if case.alone == "padded" else (ids[own, 45 - lengths[row] :], None)
    alone = generate(family, new_cache(name, family, **room), *given)
    assert batch.sequences[own, -NEW:].tolist() == alone.sequences[:, -NEW:].tolist()
    assert_near(torch.stack(batch.logits)[:, own], torch.stack(alone.logits))


@pytest.mark.turns(4)
@pytest.mark.parametrize(("name", "family"), [pair for pair in pairs(3, differs) if pair not in NORMED])
def test_rows_in_another_order_repeated_and_left_out_go_on(name: str, family: str) -> None:
    """As if the batch had been so from the start; in a chunk that is long enough for a group to become one."""
    case = CASES[name]
    ids, mask = padded([case.length + 39, case.length + 3, case.length + 32])
    (ids, tokens), mask = ids.split([case.length, 39], 1), mask[:, : case.length]
    order = torch.tensor([2, 0, 1, 1])
    one, other = new_cache(name, family), new_cache(name, family)
    watched(one, case)
    read(family, one, ids, mask, 1)
    read(family, other, ids[order], mask[order], 1)
    one.reorder_cache(torch.tensor([2, 0, 1]))
    one.batch_repeat_interleave(2)
    one.batch_select_indices(torch.tensor([True, False, True, False, True, True]))
    mask, tokens = mask[order], tokens[order]
    for low, high in ((0, 37), (37, 38), (38, 39)):
        mask = torch.cat([mask, mask.new_ones(4, high - low)], 1)
        assert_near(*(step(family, each, tokens[:, low:high], mask) for each in (one, other)), 1e-3)
    for mine, yours in zip(bounded(one), bounded(other), strict=True):
        assert [set(slots) for slots in slots_of(mine)] == [set(slots) for slots in slots_of(yours)]


# -- tokens are taken back ----------------------------------------------------------------------------------


@pytest.mark.turns(2)
@pytest.mark.parametrize(("name", "family"), pairs(4, equals))
def test_what_follows_crops_and_choices_of_rows_equals_stock(name: str, family: str) -> None:
    """After any of them the next step is what it is on a cache that never saw the rest. And a prompt taken in chunks
    returns the outputs of all its positions, or as many of the last as are asked for."""
    case, cache, length = CASES[name], new_cache(name, family), CASES[name].length
    ids = prompt(3, length)

    def same(ours: torch.Tensor, rows: torch.Tensor, stop: int, last: int = 1) -> None:
        assert_near(ours[:, -last:], expected(family, ids[rows])[:, stop - last : stop])

    cache.activate_past_recording()
    every = torch.arange(3)
    same(step(family, cache, ids[:, : length - 15], logits_to_keep=0), every, length - 15, length - 15)
    if streams(case) or family != "gemma4":  # whose last queries of shared layers transformers masks as the first
        same(step(family, cache, ids[:, length - 15 : length - 5], logits_to_keep=9), every, length - 5, 9)
    else:
        step(family, cache, ids[:, length - 15 : length - 5])
    if family in ONE_WAY:
        with pytest.raises(UsageError, match="recurrent layers, whose state cannot go back"):
            cache.crop(-9)
    else:
        cache.crop(-9)  # deeper than what is resident would also do; sliding windows record one round only
    cut = length - (5 if family in ONE_WAY else 14)
    assert cache.get_seq_length() == cut
    same(step(family, cache, ids[:, cut : cut + 2]), every, cut + 2)
    cache.crop(0)
    order = torch.tensor([2, 0, 1])
    cache.reorder_cache(order)
    same(step(family, cache, ids[order, cut + 2 : cut + 3]), order, cut + 3)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    cache.batch_repeat_interleave(2)
    rows = order[torch.tensor([0, 0, 2, 2])]
    same(step(family, cache, ids[rows, cut + 3 : cut + 5]), rows, cut + 5)
    assert_sound(cache, case)


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("name", "family", "gone"),
    [(*pair, (1, 9, 25)[number % 3]) for number, pair in enumerate(pairs(5, differs, without=RECURRENT))],
)
def test_crop_and_go_on(name: str, family: str, gone: int, tmp_path: Path) -> None:
    """Cropped slots are forgotten, those that are lost stay lost, and what comes next takes their places, in a session
    as well."""
    case, cache, length = CASES[name], new_cache(name, family), CASES[name].length
    cache.activate_past_recording()
    watched(cache, case)
    ids = prompt(2, length + 40)
    step(family, cache, ids[:, : length - 25])
    more, gone = (4, min(gone, 3)) if any(cache.is_sliding) else (25, gone)  # windows record one round only
    step(family, cache, ids[:, length - 25 : length - 25 + more])
    left = cache.get_seq_length() - gone
    before, states = [slots_of(layer) for layer in bounded(cache)], cache.entry_states()
    cache.crop(-gone)
    assert cache.get_seq_length() == left
    assert_sound(cache, case)
    for layer, lanes in zip(bounded(cache), before, strict=True):
        for now, then in zip(slots_of(layer), lanes, strict=True):
            kept = [slot for slot in then if slot < left]
            # What was merged cannot be taken out: an entry that stands for a forgotten slot is gone, too.
            assert now == kept or (case.becomes == EntryState.MERGED and set(now) <= set(kept))
        now, then = cache.entry_states()[layer.index], states[layer.index][..., :left]
        assert now.shape[2] == left and ((now == then) | (now == EntryState.DROPPED)).all()
    for low, high in ((0, 17), (17, 18), (18, 19), (19, 20)):
        assert step(family, cache, ids[:, left + low : left + high]).isfinite().all()
    save_session(tmp_path / "s", Session(cache, ids[:, : left + 20].tolist()))
    again = load_session(tmp_path / "s", tiny(family)).cache
    cache.crop(0)
    assert_near(*(step(family, one, ids[:, left + 20 : left + 21]) for one in (again, cache)))
    cache.reset()
    assert cache.get_seq_length() == cache.memory().resident_bytes == cache.memory().compressed_bytes == 0


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", covering_names(LOSSY, 5))
def test_until_something_leaves_it_is_the_unbounded_cache(name: str) -> None:
    """And a crop that undoes an append undoes it wholly."""
    family = CASES[name].families[0]
    ids, mask = padded([8, 5])
    room = {"budget": 200, "chunk": 32} if CASES[name].length == 45 else {}
    cache = new_cache(name, family, **room)
    assert_near(read(family, cache, ids, mask, 3), expected(family, ids, mask)[:, -4:])
    cache, ids = new_cache(name, family, **room), prompt(2)
    step(family, cache, ids[:, :4])
    step(family, cache, ids[:, 20:23])
    cache.crop(-3)
    exact = getattr(CASES[name].method.fate, "exact", 0) == 1  # then the rest is truncated at once
    for layer in bounded(cache):
        assert slots_of(layer) == [[] if exact else [0, 1, 2, 3]] * layer.rows * layer.heads
    for low, high in ((4, 6), (6, 7)):
        assert_near(step(family, cache, ids[:, low:high])[:, -1], expected(family, ids[:, :7])[:, high - 1])


# -- other ways to decode -----------------------------------------------------------------------------------


BEAMS = {"num_beams": 3, "num_return_sequences": 2}
SAMPLES = {"do_sample": True, "temperature": 0.7, "top_k": 0}


@pytest.mark.turns(3)
@pytest.mark.parametrize(("name", "family", "way"), [(*pair, number % 2) for number, pair in enumerate(pairs(6))])
def test_beams_and_samples(name: str, family: str, way: int) -> None:
    """Of a padded batch; what does not equal stock is at least the same each time."""
    case, options = CASES[name], (BEAMS, SAMPLES)[way]
    lengths = case.length, case.length - 9
    cache = new_cache(name, family)
    progress = watched(cache, case)
    ours = generate(family, cache, *padded(list(lengths)), **options)
    assert progress[-1] == case.length + NEW - 1
    assert {layer.rows for layer in bounded(cache)} <= {2 if way else 6}
    again = generated(family, lengths, **options) if case.equals else None
    theirs = again or generate(family, new_cache(name, family), *padded(list(lengths)), **options)
    assert ours.sequences.tolist() == theirs.sequences.tolist()


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("name", "family"),
    [pair for pair in pairs(7, without=ONE_WAY) if pair[1] != "gemma4" or streams(CASES[pair[0]])],
)
def test_assisted_decoding(name: str, family: str) -> None:
    """Prompt lookup drafts tokens, most are rejected, and the cache is rolled back: what they drove out is lost where
    it can be, the rest stays sound."""
    case, cache, crops = CASES[name], new_cache(name, family), []
    watched(cache, case)
    own = cache.crop

    def crop(tokens_to_remove: int) -> None:
        own(tokens_to_remove)
        crops.append(tokens_to_remove)
        assert_sound(cache, case)

    cache.crop = crop  # type: ignore[method-assign]
    ids = prompt(1, -(-case.length // 2)).repeat(1, 2)
    ours = generate(family, cache, ids, prompt_lookup_num_tokens=4)
    assert cache.get_seq_length() in (ids.shape[1] + NEW - 1, ids.shape[1] + NEW)
    assert min(crops) < 0
    if case.equals:
        assert ours.sequences.tolist() == answered(family, ids).sequences.tolist()


# -- elsewhere -------------------------------------------------------------------------------------------------


@pytest.mark.turns(3)
@pytest.mark.parametrize(("name", "family"), pairs(8))
def test_forks_and_sessions_go_on_as_the_cache_does(name: str, family: str, tmp_path: Path) -> None:
    """A fork does what the original would, and neither sees what the other takes in afterwards; a session that was
    saved goes on as if it had never been."""
    case, cache, model = CASES[name], new_cache(name, family), tiny(family)
    ids, mask = padded([case.length, case.length - 8])
    read(family, cache, ids, mask, 1)
    save_session(tmp_path / "s", Session(cache, ids.tolist(), {"who": "me"}))
    session = load_session(tmp_path / "s", model)
    fork, twin = cache.fork(), copy.deepcopy(cache)
    assert session.ids == ids.tolist() and session.notes == {"who": "me"}
    for other in (session.cache, fork, twin):
        assert other.model is model and other.describe() == cache.describe()
        assert other.get_seq_length() == case.length
        assert [codes.tolist() for codes in other.entry_states()] == [codes.tolist() for codes in cache.entry_states()]
    tokens = prompt(2, 9, seed=9)

    def continue_answer(own: Any, order: list[int]) -> torch.Tensor:
        seen, logits = mask, []
        for low, high in zip([0, *order], order, strict=False):
            seen = torch.cat([seen, seen.new_ones(2, high - low)], 1)
            logits.append(step(family, own, tokens[:, low:high], seen))
        return torch.cat(logits, 1)

    continue_answer(fork, [5, 6])  # what nobody else sees
    ours = continue_answer(cache, [8, 9])
    assert_near(continue_answer(twin, [8, 9]), ours, 1e-5)
    assert_near(continue_answer(session.cache, [8, 9]), ours, 1e-5)


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", covering_names([*EXACT, *DRAFTING], 7))
def test_the_past_of_an_exact_cache_may_be_put_into_any_other(name: str) -> None:
    """Of every exact method, into a sixth of all of them: what follows is what follows on the unbounded cache."""
    family, cases = "llama", EXACT | DRAFTING
    ids = prompt(1, 60)
    cache, number = new_cache(name, family), [*cases].index(name)
    step(family, cache, ids[:, :50])
    for place, (other, case) in enumerate(cases.items()):
        if (place + number) % 6:
            continue
        options = {"budget": case.budget, "chunk": case.chunk} | dict(case.options)
        try:
            fork = cache.fork(case.spec, **options)
        except UsageError as error:
            assert str(error).startswith(
                f"The entries of a cache cannot be moved into a cache of method '{case.spec}': "
            )
            assert not handed_on(name, other), f"{name} -> {other}: {error}"
            if "needs the ids" not in str(error):
                continue
            with pytest.raises(UsageError, match="not those of the 50 tokens"):
                cache.fork(case.spec, ids=[1, 2], **options)
            fork = cache.fork(case.spec, ids=ids[0, :50].tolist(), **options)
        else:
            assert handed_on(name, other), f"{name} -> {other}"
        assert fork.method.name == case.spec and fork.get_seq_length() == 50
        assert_near(step(family, fork, ids[:, 50:52])[:, -1], expected(family, ids)[:, 51])
        assert_near(step(family, fork, ids[:, 52:53])[:, -1], expected(family, ids)[:, 52])
    assert_near(step(family, cache, ids[:, 50:51])[:, -1], expected(family, ids)[:, 50])


@pytest.mark.turns(3)
@pytest.mark.parametrize(("name", "family"), pairs(9, streams, everywhere=("kv", "residual:3", "h2o+kv")))
def test_a_step_that_was_left_in_the_middle_can_be_taken_again(name: str, family: str) -> None:
    case, cache = CASES[name], new_cache(name, family)
    ids = prompt(2, case.length)
    step(family, cache, ids[:, :-5])
    with broken(tiny(family), 2, RuntimeError):
        step(family, cache, ids[:, -5:])
    if any(cache.is_sliding) or family in RECURRENT:  # which cannot be rolled back: it says so
        moved = "recurrent state" if family in RECURRENT else "sliding window"
        with pytest.raises(kvkeep.KvkeepError, match=f"a {moved} cannot be rolled back; call reset"):
            step(family, cache, ids[:, -5:])
        return
    assert cache.get_seq_length() == case.length - 5
    assert_sound(cache, case)
    watched(cache, case)
    ours = step(family, cache, ids[:, -5:])
    assert ours.isfinite().all()
    if case.equals:
        assert_near(ours[:, -1], expected(family, ids)[:, -1])
