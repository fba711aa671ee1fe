"""Selective recall: what is left out is never more than the certificate says, and entries leave and come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import RECURRENT
from families import FAMILIES, tiny
from helpers import assert_near, bounded, expected, padded, prompt, step
from hypothesis import given, settings
from hypothesis import strategies as st
from kvkeep_lab.published.by_hand import evict, recall
from kvkeep_lab.published.selective import FEW, Selective, certificates
from torch import Tensor

from kvkeep import EntryState, KeepCache, UsageError
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.step.scores import scores_of
from kvkeep.step.torch import sink_scores
from kvkeep.stores.layer import Layer

BUDGET = 16
METHODS = ["h2o+pages:1", "snapkv:window=4,kernel=3+pages:2", "tova+pages:3", "kv-lru"]
LATENT = "deepseek_v3"


# -- the certificate ---------------------------------------------------------------------------------


@dataclass
class Call:
    """One call of attention. true: the largest share of any query's attention that was left out, from all weights;
    bound: what the layer said of it; taken: what it attended; error: how far its output is from softmax over that."""

    layer: int
    true: float
    bound: float
    taken: Tensor
    error: float


@contextmanager
def watched() -> Iterator[list[Call]]:
    """Compute full attention beside every step in which pages are chosen."""
    calls: list[Call] = []
    choose = Selective._chosen_pages

    def chosen(self: Selective, layer: Layer, near: Any, asked: AttentionInputs) -> Any:
        before, self.last = self.last, 0.0
        output, lse, wanted = choose(self, layer, near, asked)
        bound, self.last = self.last, max(before, self.last)
        taken = layer.resident.resident_slots() if layer.length else torch.zeros(len(output), 0, dtype=torch.bool)
        if wanted is not None:
            assert not (wanted & taken).any()  # nothing counts twice
            taken = taken | wanted
        pieces = [layer.everything()] if layer.length else []
        if layer.pending is not None:
            pieces.append(layer.pending)
            taken = torch.cat([taken, torch.ones(len(output), asked.new, dtype=torch.bool)], 1)
        keys, values = (torch.cat(part, 1).double() for part in zip(*pieces, strict=True))
        total, queries = keys.shape[1], asked.queries
        seen = (torch.arange(total) <= torch.arange(total - queries, total)[:, None])[None, None]
        real = torch.ones(1, 1, queries, dtype=torch.bool)
        if (visible := layer.ledger.visible_by(layer.heads)) is not None:
            seen, real = seen & visible, visible[..., -queries:].squeeze(1)
        scores = scores_of(torch.einsum("lhqd,lsd->lhqs", asked.query.double(), keys), asked.scaling)
        sinks = [] if asked.sinks is None else [sink_scores(asked.sinks, asked.query).double()]

        def weights(seen: Tensor) -> Tensor:
            return torch.cat([scores.masked_fill(~seen, float("-inf")), *sinks], -1).softmax(-1)[..., :total]

        left = weights(seen).masked_fill(taken[:, None, None], 0).sum(-1)
        own = weights(seen & taken[:, None, None])
        keep = real.expand(left.shape)
        error = (output.double() - torch.einsum("lhqs,lsd->lhqd", own, values)).abs()[keep].max()
        calls.append(Call(layer.index, float(left[keep].max()), bound, taken, float(error)))
        return output, lse, wanted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Selective, "_chosen_pages", chosen)
        yield calls


def assert_held(calls: list[Call]) -> None:
    assert calls
    for call in calls:
        assert call.true <= call.bound + 1e-5
        assert call.error < 2e-4


OTHERS = [family for family in FAMILIES if family != LATENT]


@pytest.mark.parametrize(
    ("family", "method"),
    [(family, METHODS[(number + turn) % 4]) for number, family in enumerate(OTHERS) for turn in (0, 2)],
)
def test_the_certificate_holds(family: str, method: str) -> None:
    """Chunks, short steps and single tokens of a padded batch, and after a rollback."""
    ids, mask = padded([130, 123, 90])
    cache = KeepCache(tiny(family), method, BUDGET, checkpoint="kv", where="host")
    ends = [100, 101, 109, 110, *range(113, 117)]
    with watched() as calls:
        for low, high in zip([0, *ends], ends, strict=False):
            step(family, cache, ids[:, low:high], mask[:, :high])
        if not any(cache.is_sliding) and family not in RECURRENT:
            cache.crop(-14)
            for high in range(103, 105):
                step(family, cache, ids[:, high : high + 1], mask[:, : high + 1])
    assert_held(calls)
    worst = {call.layer: max(other.bound for other in calls if other.layer == call.layer) for call in calls}
    assert {found.layer: found.worst for found in certificates(cache)} == worst
    assert all(found.last <= found.worst and found.recalled <= found.away for found in certificates(cache))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    method=st.sampled_from(METHODS),
    chunks=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    scale=st.sampled_from([0.05, 1.0, 5.0]),
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 2),
)
def test_the_certificate_holds_for_random_inputs(
    method: str, chunks: list[int], scale: float, seed: int, rows: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = KeepCache(tiny("llama"), method, BUDGET, checkpoint="kv", where="host", chunk=16)
    with watched() as calls:
        for count in (*chunks, *[1] * 6):
            step("llama", cache, torch.randn(rows, count, 32, generator=generator) * scale)
    assert_held(calls)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("method", ["snapkv+pages:4", "kv-lru"])
def test_the_certificate_holds_on_real_text(smollm2: Any, method: str) -> None:
    from kvkeep_lab.prompts import TEXT

    ids = smollm2.tokenizer(TEXT * 2, return_tensors="pt").input_ids[:, :132]
    cache = KeepCache(smollm2.model, method, 64, checkpoint="kv", where="host")
    with watched() as calls:
        for own in ids.split([128, *[1] * 4], 1):
            step(smollm2.model, cache, own)
    assert_held(calls)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma4"])
def test_more_pages_leave_less_out(family: str) -> None:
    """In one and the same step, of the first layer: later ones are asked by other queries."""
    ids, bounds, before = prompt(2, 201), [], None
    for count in (1, 2, 5, "all"):
        cache = KeepCache(tiny(family), f"h2o+pages:{count}", BUDGET, checkpoint="kv", where="host")
        step(family, cache, ids[:, :200])
        with watched() as calls:
            step(family, cache, ids[:, 200:])
        bounds.append(calls[0].bound)
        assert before is None or (before <= calls[0].taken).all()
        before = calls[0].taken
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > 0 and bounds[-1] == 0


@pytest.mark.parametrize(
    ("family", "method", "count"),
    [
        *((LATENT, method, 1) for method in ("h2o+pages:1", "kv-lru")),
        ("llama", "h2o+pages:1", FEW + 4),
    ],
)
def test_latent_attention_and_long_steps_leave_nothing_out(family: str, method: str, count: int) -> None:
    ids, low = prompt(2, 50 + 5 * count), 50
    cache = KeepCache(tiny(family), method, BUDGET, checkpoint="kv", where="host")
    step(family, cache, ids[:, :low])
    for high in range(low + count, ids.shape[1] + 1, count):
        assert_near(step(family, cache, ids[:, low:high])[:, -1], expected(family, ids)[:, high - 1])
        low = high
    assert all(found.worst == 0 for found in certificates(cache))


def test_kinds_give_the_same() -> None:
    """Entries and residuals, on any place, and a page of residuals smaller than what is recalled."""
    ids, found = prompt(2, 150), []
    for options in ({"checkpoint": "kv", "where": "disk"}, {"checkpoint": "residual", "where": "host", "page": 20}):
        cache = KeepCache(tiny("llama"), "h2o+pages:1", BUDGET, **options)
        found.append(torch.cat([step("llama", cache, own) for own in ids.split([*[10] * 14, *[1] * 10], 1)]))
    assert_near(*found)


# -- entries that leave and come back ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((own, "kv-lru") for own in ("llama", LATENT, "gemma4")),
        ("gemma3", "h2o+verified:4"),
        ("gpt2", "knorm+pages:1"),
    ],
)
def test_evict_and_recall_by_hand(family: str, method: str) -> None:
    ids, wanted = prompt(2, 80), [5, 60, 61, 62]
    cache = KeepCache(tiny(family), method, BUDGET, checkpoint="kv", where="host")
    step(family, cache, ids[:, :70])
    layers = bounded(cache)
    held = [layer.resident.resident_slots().sum(1) for layer in layers]
    evict(cache, 3)
    for layer, before in zip(layers, held, strict=True):
        assert (layer.resident.resident_slots().sum(1) == before - 3).all()
    away = sum(int((~layer.resident.resident_slots()[:, wanted]).sum()) for layer in layers)
    assert recall(cache, [*wanted, 5]) == away > 0
    for layer in layers:
        now = layer.resident.resident_slots()
        assert now[:, wanted].all() and (now.sum(1) <= BUDGET).all()
        keys, _ = layer.everything()
        for bank in layer.resident.banks:
            lane, column = (bank.slots >= 0).nonzero(as_tuple=True)
            assert (bank.keys[lane, column] == bank.of(keys)[lane, bank.slots[lane, column].long()]).all()
        assert (cache.entry_states()[layer.index][..., 5] == EntryState.RESIDENT).all()
    assert recall(cache, wanted) == 0
    for at in range(70, 80):
        assert step(family, cache, ids[:, at : at + 1]).isfinite().all()
    evict(cache, 10**6)
    assert not any(layer.resident.resident_slots().any() for layer in layers)
    assert step(family, cache, ids[:, :1]).isfinite().all()


def test_no_more_than_the_limit_comes_back() -> None:
    cache, lanes = KeepCache(tiny("llama"), "kv-lru", 100), 4 * 2
    step("llama", cache, prompt(1, 200))
    evict(cache, 100)
    assert recall(cache, range(150)) == 64 * lanes
    assert all(
        layer.resident.resident_slots()[:, :64].all() and not layer.resident.resident_slots()[:, 64:].any()
        for layer in bounded(cache)
    )
    assert recall(cache, range(150), limit=7) == 7 * lanes
    assert recall(cache, range(150, 200), limit=200) == 50 * lanes
    assert recall(cache, range(200), limit=0) == 0


def test_methods_without_all_entries_in_checkpoints_say_so() -> None:
    def new(method: str, budget: int, **options: Any) -> KeepCache:
        cache = KeepCache(tiny("llama"), method, budget, **options)
        step("llama", cache, prompt(1, 40))
        return cache

    for method in ("h2o", "kv-direct", "h2o+quantize:4", "h2o+merge+verified"):
        cache = new(method, 300)
        for call in (lambda cache=cache: evict(cache, 1), lambda cache=cache: recall(cache, [0])):
            with pytest.raises(UsageError, match="kv-lru"):
                call()
        assert certificates(cache) == []
    with pytest.raises(UsageError, match="tokens"):
        recall(new("h2o+verified", BUDGET, checkpoint="tokens"), [0])
    cache = new("kv-lru", BUDGET)
    for call, *own in ((recall, [40]), (recall, [-1]), (recall, [0], -1), (evict, -1)):
        with pytest.raises(UsageError, match="at least 0"):
            call(cache, *own)


def test_a_ring_loses_what_falls_out_and_says_so() -> None:
    ids = prompt(2, 90)
    cache = KeepCache(tiny("llama"), "kv-lru", BUDGET, checkpoint="kv", where="host", capacity=50)
    step("llama", cache, ids[:, :50])
    assert cache.exactness == "reversible"
    for own in ids[:, 50:].split([*[1] * 20, 20], 1):
        step("llama", cache, own)
    assert cache.exactness == "lossy"
    assert all(found.worst == 1.0 for found in certificates(cache))
    codes = torch.stack(cache.entry_states())
    assert (codes[..., :40] != EntryState.CHECKPOINTED).all() and (codes[..., :40] == EntryState.DROPPED).any()
    assert (codes[..., 40:] != EntryState.DROPPED).all()
    gone = [slot for slot in range(40) if (codes[..., slot] == EntryState.DROPPED).all()]
    assert gone and recall(cache, gone) == 0


def test_a_long_step_attends_what_is_resident_though_the_backing_has_lost_it() -> None:
    """A ring of as many entries as the budget: whatever is still somewhere is attended, once."""
    ids, seen = prompt(1, 60), []
    cache = KeepCache(tiny("llama"), "streaming-llm:positions=absolute+missed:0", BUDGET, checkpoint="kv", capacity=20)
    step("llama", cache, ids[:, :40])
    layer = bounded(cache)[0]
    assert layer.resident.resident_slots()[:, :4].all() and layer.reader.first == 20
    own = layer.segment

    def segment(piece: Any, asked: AttentionInputs, wide: Any, keep: Any = None) -> Any:
        count = piece.keys.shape[2]
        slots = torch.arange(piece.first, piece.first + count)[None] if piece.slots is None else piece.slots
        there = slots[:1] >= 0 if keep is None else keep[:1].gather(1, slots[:1].clamp(min=0).long())
        seen.extend(slots[:1][there].tolist())  # of the first lane
        return own(piece, asked, wide, keep)

    layer.segment = segment  # type: ignore[method-assign]
    step("llama", cache, ids[:, 40:52])
    assert sorted(seen) == [*range(4), *range(20, 40)]


def test_rows_chosen_while_padded_can_be_exchanged() -> None:
    """What is padding follows the rows."""
    ids, mask = padded([60, 30, 60])
    cache = KeepCache(tiny("llama"), "kv-lru", BUDGET)
    step("llama", cache, ids, mask)
    cache.batch_select_indices(torch.tensor([1, 2]))
    cache.crop(-5)
    recall(cache, [2, 40])
    for layer in bounded(cache):
        held = layer.resident.resident_slots().unflatten(0, (2, -1))
        assert not held[0, :, 2].any() and held[1, :, 2].all() and held[:, :, 40].all()
    cache.batch_select_indices(torch.tensor([1]))
    recall(cache, [3])
    assert all(layer.resident.resident_slots()[:, 3].all() for layer in bounded(cache))


def test_entries_of_a_checkpoint_leave_and_come_back_by_hand() -> None:
    ids = prompt(1, 50)
    cache = KeepCache(tiny("llama"), "snapkv+checkpoint:kv", BUDGET)
    step("llama", cache, ids[:, :40])
    evict(cache, BUDGET)
    assert not any(layer.resident.resident_slots().any() for layer in bounded(cache))
    assert recall(cache, range(8)) == 8 * 2 * 4
    assert_near(step("llama", cache, ids[:, 40:]), expected("llama", ids)[:, -1:])
