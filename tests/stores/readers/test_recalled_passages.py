"""Recalled passages: exact up to a number of tokens, and beyond it chosen passages before the newest entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from torch import Tensor

from kvkeep import BudgetError, EntryState, Exactness, KeepCache, Session, UsageError, load_session, save_session
from kvkeep.decode.cached_text import CachedText
from kvkeep.errors import NotCarried
from kvkeep.policies.methods import resolve
from kvkeep.serve.session import peak_bytes
from kvkeep.stores.readers.recalled_passages import RecalledPassages

FAMILIES = ("llama", "qwen3", "gemma3", "phi3", "qwen3_next")
SPEC = "endless+passages:count=3,size=16,exact=64"


def _ids(count: int, rows: int = 1) -> Tensor:
    return torch.randint(3, 90, (rows, count), generator=torch.Generator().manual_seed(5))


def _logits(model: Any, cache: KeepCache, ids: Tensor, steps: int = 8) -> Tensor:
    """Return the logits of the last ``steps`` tokens, read one by one after the others."""
    with torch.no_grad():
        model(ids[:, :-steps], cache=cache)
        return torch.cat([model(ids[:, at : at + 1], cache=cache).logits for at in range(-steps, -1)], 1)


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["endless+passages:count=3,size=16", "endless+passages:count=20,size=16,exact=40"])
def test_all_entries_or_all_blocks_are_full_attention(family: str, spec: str) -> None:
    model, ids = tiny(family), _ids(150, rows=2)
    found = _logits(model, KeepCache(model, spec, 24, chunk=16, where="disk"), ids)
    wanted = _logits(model, KeepCache(model, "full"), ids)
    assert torch.allclose(found, wanted, atol=2e-3 * float(wanted.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["disk", "host"])
def test_memory_does_not_grow_with_the_text_beside_a_checkpoint_on_disk(where: str) -> None:
    model, found, kept = tiny("llama"), [], []
    for count in (600, 2400):
        cache, ids = KeepCache(model, SPEC, 24, chunk=16, where=where), _ids(count)
        _logits(model, cache, ids)
        memory = cache.memory()
        found.append(memory.resident_bytes + memory.compressed_bytes + memory.bookkeeping_bytes)
        kept.append(torch.equal(cache.ledger.span(0, count - 1)[0], ids[:, :-1].int()))
    assert all(kept) and (found[0] == found[1]) == (where == "disk")


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_blocks_are_attended_at_the_places_before_the_newest(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotating the keys of the copies is rotating the query back, passage by passage."""
    copy, moves = RecalledPassages._copy, []

    def compare(self: RecalledPassages, layer: Any) -> None:
        copy(self, layer)
        numbers, size = self.choice.numbers, self.choice.size
        assert numbers is not None and self._copies is not None
        keys, values = self.checkpoint.passages(self.index, numbers.repeat_interleave(layer.heads, 0), size)
        moved = (torch.arange(self.choice.passages - numbers.shape[1], self.choice.passages) - numbers[0]) * size
        query = torch.randn(layer.heads, 1, 1, keys.shape[-1])
        scores = query[:, 0] @ self._copies.keys.mT
        back = -moved[None].expand(layer.heads, -1)
        turned = self.adapter.turn(
            self.index, query.expand(-1, -1, len(moved), -1), self.adapter.angles(self.index, query, back)
        )
        wanted = torch.einsum("lnd,lnsd->lns", turned[:, 0], keys).flatten(1)
        assert torch.allclose(scores[:, 0], wanted, atol=1e-3) and torch.equal(
            self._copies.values, values.flatten(1, 2)
        )
        moves.append(bool((moved > 0).any()))

    monkeypatch.setattr(RecalledPassages, "_copy", compare)
    model = tiny(family)
    _logits(model, KeepCache(model, SPEC, 24, chunk=16, where="host"), _ids(230))
    assert any(moves)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_the_block_with_the_words_of_the_question_is_recalled_in_all_layers(family: str) -> None:
    model, ids, question = tiny(family), _ids(300), torch.tensor([[91, 92, 93, 94]])
    ids[:, 70:74] = question  # in passage 4
    cache = KeepCache(model, SPEC.replace("3", "6"), 24, chunk=16, where="host")
    readers = [cache.layers[layer.index].reader for layer in cache.geometry.full_layers]
    with torch.no_grad():
        model(ids, cache=cache)
        model(question, cache=cache)
        for _ in range(40):  # an answer without words of the text
            assert all(reader._copied is reader.choice.numbers is readers[0].choice.numbers for reader in readers)
            assert {0, 4, 5} <= {*readers[0].choice.numbers[0].tolist()}
            model(torch.tensor([[96]]), cache=cache)


def test_single_tokens_are_planned_and_see_what_many_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two choices a step attends to the copies and to all entries after the passages: as the same tokens do in
    one pass that keeps the choice."""
    model, ids = tiny("llama"), _ids(230)
    cache, last = KeepCache(model, SPEC, 24, chunk=16, where="host"), ids[:, -20:]
    reader = cache.layers[0].reader
    with torch.no_grad():
        model(ids[:, :-20], cache=cache)
        twin = cache.fork()
        planned, found = [], []
        for token in last.split(1, 1):
            found.append(model(token, cache=cache).logits)
            planned.append(cache.layers[0].plan() is not None)
        choice, numbers = twin.layers[0].reader.choice, reader.choice.numbers
        monkeypatch.setattr(
            choice, "choose", lambda passages, new, gone, choose=choice.choose: choose(passages, 1, gone)
        )
        wanted = model(last, cache=twin).logits
    assert all(planned) and reader.choice.numbers is numbers
    assert torch.allclose(torch.cat(found, 1), wanted, atol=1e-3)


def test_a_text_longer_than_the_positions_stays_within_the_budget() -> None:
    model, ids = tiny("llama"), _ids(700)
    cache, held = KeepCache(model, SPEC, 32, chunk=32, where="host"), set()
    with torch.no_grad():
        for part in ids.split(50, 1):
            assert model(part, cache=cache).logits.isfinite().all()
            states = cache.entry_states()
            assert all(int((layer == 1).sum(-1).max()) <= 32 for layer in states)
            held.add(cache.memory().resident_bytes)
    assert len(held) == 1
    assert cache.exactness == Exactness.REVERSIBLE and "exact up to 64 tokens" in cache.describe()[0].note


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_the_planner_counts_the_copies(family: str) -> None:
    model, ids = tiny(family), _ids(450)
    cache = KeepCache(model, SPEC, 24, chunk=16, where="host")
    granted = [peak_bytes(cache, length) for length in (60, 449, 450)]
    with torch.no_grad():
        for part, most in zip(ids.split([60, 389, 1], 1), granted, strict=True):
            model(part, cache=cache)
            assert cache.memory().bytes <= most
    layers = cache.geometry.full_layers
    held = sum(cache.layers[layer.index].reader.bookkeeping_bytes for layer in layers)
    assert 0 < held == sum(cache.method.recall.holds(layer, cache.geometry, 450, 426).bookkeeping for layer in layers)


def test_another_budget_takes_the_entries_over_and_more_exact_tokens_do_not() -> None:
    model, ids = tiny("llama"), _ids(200)
    cache = KeepCache(model, SPEC, 24, chunk=16, where="disk")
    with torch.no_grad():
        model(ids, cache=cache)
        twin = cache.fork(SPEC.replace("64", "40"), 32, chunk=16, where="host")
        for ours, theirs in zip(cache.layers, twin.layers, strict=True):
            for part, other in zip(ours.everything(), theirs.everything(), strict=True):
                assert torch.equal(part, other)
        assert twin.exactness is Exactness.REVERSIBLE and torch.equal(twin.ledger.span(0, 200)[0], ids.int())
        assert model(ids[:, :5], cache=twin).logits.isfinite().all()
    with pytest.raises(UsageError, match="its first 64 tokens are exact, and 80 are wanted"):
        cache.fork(SPEC.replace("64", "80"), 24, chunk=16)
    with pytest.raises(UsageError, match="'endless.*' does not hold all entries exactly"):
        cache.fork("kv-direct", 24)


def test_after_a_crop_the_newest_entries_are_attended_where_they_are() -> None:
    """After a crop of more tokens than the budget, no entry is resident."""
    model, ids = tiny("llama"), _ids(210)
    found = []
    for cropped in (0, 50):
        cache = KeepCache(model, SPEC, 24, chunk=16, where="host")
        with torch.no_grad():
            model(ids[:, :144], cache=cache)
            if cropped:
                model(ids[:, :cropped], cache=cache)
                cache.crop(-cropped)
            parts = [model(part, cache=cache).logits for part in ids[:, 144:].split([5, *[1] * 61], 1)]
        found.append(torch.cat(parts, 1))
    assert torch.allclose(*found, atol=1e-3)


def test_a_question_whose_end_is_read_again_recalls_the_same_blocks() -> None:
    """As in a second answer to the same question."""
    model, ids = tiny("llama"), _ids(260)
    cache = KeepCache(model, SPEC, 24, chunk=16, where="host")
    with torch.no_grad():
        model(ids[:, :200], cache=cache)
        found = [model(ids[:, 200:210], cache=cache).logits[:, -1:]]
        answer = [model(ids[:, at : at + 1], cache=cache).logits for at in range(210, 260)]
        cache.crop(-51)
        found.append(model(ids[:, 209:210], cache=cache).logits)
        again = [model(ids[:, at : at + 1], cache=cache).logits for at in range(210, 260)]
    assert torch.allclose(*found, atol=1e-3)
    assert torch.allclose(torch.cat(answer, 1), torch.cat(again, 1), atol=1e-3)


def test_what_cannot_be_recalled_is_refused() -> None:
    for spec in (
        "window+passages",
        "h2o+checkpoint:kv+passages",
        "kv-direct+passages",
        "endless:residual",
        "endless+pages:2",
    ):
        with pytest.raises(UsageError):
            resolve(spec)
    for spec in ("endless+passages:size=100", "endless+passages:0"):
        with pytest.raises(UsageError):
            resolve(spec)
    with pytest.raises(BudgetError, match="space for"):
        KeepCache(tiny("llama"), "endless", 64)
    with pytest.raises(UsageError, match="capacity"):
        KeepCache(tiny("llama"), SPEC, 24, capacity=100)
    model, mask = tiny("llama"), torch.ones(2, 100, dtype=torch.long)
    mask[0, :9] = 0
    with pytest.raises(UsageError, match="padding"):
        model(_ids(100, rows=2), attention_mask=mask, cache=KeepCache(model, SPEC, 24, chunk=16))


QUOTA = 64 + 1024 + 256
"""The smallest capacity of a cache that attends to 64 tokens exactly."""


def _quota(text: Tensor, capacity: int | None, where: str = "disk") -> KeepCache:
    """Return a cache that has read ``text`` in pieces of 80 tokens, and one token more by itself."""
    model = tiny("llama", positions=4096)
    cache = KeepCache(model, SPEC, 32, chunk=32, where=where, capacity=capacity)
    with torch.no_grad():
        for part in text.split(80, 1):
            model(part, cache=cache)
    return cache


@pytest.mark.turns(2)
@pytest.mark.parametrize("where", ["disk", "host"])
def test_a_full_checkpoint_drops_its_oldest_blocks_and_stays_within_the_capacity(where: str) -> None:
    model, ids, question = tiny("llama", positions=4096), _ids(2800), torch.tensor([[91, 92, 93, 94]])
    cache = KeepCache(model, SPEC, 32, chunk=32, where=where, capacity=QUOTA)
    most, resident, lost = QUOTA * cache.geometry.full_bytes_per_token, set[int](), [0]
    with torch.no_grad():
        for number, part in enumerate(ids.split(80, 1)):
            model(part, cache=cache)
            memory = cache.memory()
            assert memory.checkpoint_bytes[where] <= most
            resident |= {memory.resident_bytes} if number else set()
            lost.append(cache.lost_tokens)
            freed = cache.checkpoint.first(0) > 0
            assert cache.exactness is (Exactness.LOSSY if freed else Exactness.REVERSIBLE)
    assert len(resident) == 1, "resident bytes stay the same however long the text is"
    assert lost == sorted(lost) and 0 == lost[10] < lost[-1] <= 2800
    states = cache.entry_states()[0]
    assert int((states == EntryState.DROPPED).sum()) == lost[-1] * states.shape[1]
    (note,) = {report.note for report in cache.describe()}
    assert note.startswith("exact up to 64 tokens") and "the oldest are dropped" in note
    chosen = cache.layers[0].reader.choice
    with torch.no_grad():
        model(question, cache=cache)
    assert chosen.numbers[0, 0] == 0, "the first passage stays"
    assert all(number == 0 or number * 16 >= cache.checkpoint.first(0) for number in chosen.numbers[0].tolist())


def test_a_block_is_recalled_until_it_is_dropped() -> None:
    model, ids, question = tiny("llama", positions=4096), _ids(2100), torch.tensor([[91, 92, 93, 94]])
    ids[:, 400:404] = question  # in passage 25
    for tokens, there in ((1200, True), (2100, False)):
        cache = _quota(ids[:, :tokens], QUOTA)
        with torch.no_grad():
            model(question, cache=cache)
        assert (25 in cache.layers[0].reader.choice.numbers[0].tolist()) == there
        assert (cache.lost_tokens > 420) != there


@pytest.mark.slow
def test_what_is_not_lost_is_as_without_a_capacity() -> None:
    """Before the first loss in all bits, and after it where the same passages are recalled."""
    model, ids = tiny("llama", positions=4096), _ids(2080)
    ids[:, 1984:1992] = ids[:, -8:]  # a question whose passages are there in both
    for tokens in (1000, 2080):
        logits = []
        for capacity in (None, QUOTA):
            cache = _quota(ids[:, : tokens - 8], capacity)
            with torch.no_grad():
                logits.append(model(ids[:, tokens - 8 : tokens], cache=cache).logits)
            last = cache.layers[0].reader.choice.numbers
        if tokens == 1000:
            assert torch.equal(*logits)
        else:
            assert 124 in last[0].tolist() and cache.lost_tokens


def test_a_cache_that_has_lost_blocks_is_copied_saved_and_not_cropped_into_them(tmp_path: Path) -> None:
    model, ids = tiny("llama", positions=4096), _ids(2010)
    cache = _quota(ids[:, :2000], QUOTA)
    assert cache.crops and cache.exactness is Exactness.LOSSY
    save_session(tmp_path / "s", Session(cache, ids[:, :2000].tolist()))
    found = [cache.fork(), load_session(tmp_path / "s", model).cache, cache]
    with torch.no_grad():
        steps = [[model(ids[:, at : at + 1], cache=one).logits for at in range(2000, 2010)] for one in found]
    logits = [torch.cat(own, 1) for own in steps]
    assert all(torch.allclose(one, logits[2], atol=1e-5) for one in logits)
    assert len({one.lost_tokens for one in found}) == 1
    with pytest.raises(UsageError, match="has lost entries that the text before"):
        cache.crop(-1800)
    cache.crop(-20)
    assert cache.get_seq_length() == 1990


@pytest.mark.turns(2)
@pytest.mark.parametrize("exact", [64, 900])
def test_a_crop_to_where_entries_are_lost_is_refused(exact: int) -> None:
    """Those of an exact text, or the newest ones: the text is read again, and is what it was."""
    model, ids, method = tiny("llama", positions=4096), _ids(2300), f"endless+passages:count=3,size=16,exact={exact}"
    cache = KeepCache(model, method, 96, chunk=16, where="host", capacity=exact + 1400)
    with torch.no_grad():
        model(ids, cache=cache)
        first = cache.checkpoint.first(0)
        assert 96 < first < exact or exact == 64
        for length in (32, first, exact if exact > first else first + 96):
            with pytest.raises(UsageError, match="has lost entries that the text before"):
                cache.crop(length - 2300)
        past = CachedText(cache, ids[0].tolist())
        past.align(ids[0, : first + 200].tolist())
        again = first + 199 > max(exact, first + 96)
        assert len(past.ids) == cache.get_seq_length() == (first + 199 if again else 0)


def test_no_distance_exceeds_the_positions() -> None:
    """A full number of passages, a chunk, a passage that is not whole, and what is written until the next choice."""
    model, ids = tiny("llama", positions=512), _ids(1000)
    with pytest.raises(BudgetError, match=r"space for 19 of 20 passages of 16; .* \(endless\+passages:19\)"):
        KeepCache(model, "endless+passages:count=20,size=16,exact=64", 96, chunk=64)
    cache, most = KeepCache(model, "endless+passages:count=19,size=16,exact=64", 96, chunk=64), 0
    with torch.no_grad():
        for start, stop in ((0, 700), *((at, at + 1) for at in range(700, 800))):
            model(ids[:, start:stop], cache=cache)
            choice = cache.layers[0].reader.choice
            most = max(most, stop - (choice.passages - choice.numbers.shape[1]) * choice.size)
    assert 450 < most <= 512


def test_a_cache_that_has_lost_a_page_is_read_again_for_another_budget() -> None:
    """The copy would have nothing in place of it."""
    model, ids = tiny("llama", positions=4096), _ids(1060)
    cache = _quota(ids, QUOTA)
    with torch.no_grad():
        for _ in range(8):
            model(ids[:, :50], cache=cache)
            if cache.checkpoint.first(0):
                break
    assert cache.checkpoint.first(0) == 256 and not cache.lost_tokens
    with pytest.raises(NotCarried):
        cache.fork(method=SPEC, budget=24)


def test_memory_within_a_capacity_is_what_is_granted() -> None:
    model, ids = tiny("llama", positions=4096), _ids(2600)
    for capacity in (QUOTA, 9000):
        cache = KeepCache(model, SPEC, 32, chunk=32, where="host", capacity=capacity)
        for start, stop in ((0, 300), (300, 1300), (1300, 2600)):
            with torch.no_grad():
                model(ids[:, start:stop], cache=cache)
            assert cache.memory().bytes <= peak_bytes(cache, stop), (capacity, stop)
        if capacity == QUOTA:
            bound = QUOTA * cache.geometry.kv_bytes_per_token + 40 * 50_000
            assert peak_bytes(cache, 50_000) < bound, "it does not grow with the text, but for ids"


def test_a_capacity_that_is_too_small_is_refused() -> None:
    model = tiny("llama", positions=4096)
    with pytest.raises(UsageError, match="1,343 entries is too small .* first 64 tokens; give at least 1,344"):
        KeepCache(model, SPEC, 24, chunk=16, capacity=QUOTA - 1)
    with pytest.raises(UsageError, match="give at least 5,376"):
        KeepCache(model, "endless", 24, chunk=16, capacity=4096)
    with pytest.raises(UsageError, match=r"give at least 5,376, or fewer exact tokens .*:exact=3220\)\.$"):
        KeepCache(model, "endless", 24, chunk=16, capacity=4500)


def test_another_kind_of_checkpoint_and_more_exact_tokens_than_positions_are_refused() -> None:
    model = tiny("llama", positions=512)
    with pytest.raises(UsageError, match="The checkpoint of method 'endless' is of kind 'kv'; leave 'residual' out"):
        KeepCache(model, "endless", 24, checkpoint="residual")
    KeepCache(model, SPEC, 24, checkpoint="kv", chunk=16)
    with pytest.raises(UsageError, match="exact up to the model's 512 positions at most, not up to 513 tokens"):
        KeepCache(model, "endless+passages:count=3,size=16,exact=513", 24, chunk=16)


@pytest.mark.slow
def test_the_newest_entries_may_begin_within_full_pages() -> None:
    """Of pages that became full since the choice, a step attends to a part; with one large page there are none."""
    model, ids, found = tiny("llama", positions=512), _ids(1500), []
    for page in (128, 2048):
        cache = KeepCache(model, "endless+passages:count=1,size=16,exact=300", 32, chunk=16, page=page)
        found.append(_logits(model, cache, ids, steps=200))
    assert torch.equal(*found)
