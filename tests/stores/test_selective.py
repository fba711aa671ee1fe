"""Selective recall: what is left out is never more than the certificate says, and entries leave and come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from kvkeep.stores.logged import LoggedLayer
from torch import Tensor

from kvkeep import EntryState, KeepCache, Session, UsageError, load, load_session, save_session
from kvkeep.stores.selective import FEW, SelectiveLayer

BUDGET = 16
METHODS = ["h2o+pages:1", "snapkv:window=4,kernel=3+pages:2", "h2o+certified:0.3", "tova+certified:0.9", "kv-lru"]
LATENT = "deepseek_v3"


def prompt(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def step(model: Any, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits


def layers(cache: KeepCache) -> list[SelectiveLayer]:
    return [layer for layer in cache.layers if isinstance(layer, SelectiveLayer)]


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
    choose, read = SelectiveLayer._chosen_pages, SelectiveLayer._recall
    recalled: list[Tensor] = []

    def recall(self: SelectiveLayer, module: Any, wanted: Tensor) -> Any:
        recalled.append(wanted)
        return read(self, module, wanted)

    def chosen(self: SelectiveLayer, query: Tensor, own: Any, asked: Any) -> Any:
        recalled.clear()
        before, self.last = self.last, 0.0
        output, lse = choose(self, query, own, asked)
        bound, self.last = self.last, max(before, self.last)
        pieces = [
            (keys.flatten(0, 1), values.flatten(0, 1)) for _, keys, values in self.log.recall(self.index, self.length)
        ]
        taken = self.held() if pieces else torch.zeros(len(query), 0, dtype=torch.bool)
        for wanted in recalled:
            assert not (wanted[:, : self.length] & taken).any()  # nothing counts twice
            taken = taken | wanted[:, : self.length]
        if self.pending is not None:
            pieces.append((self.by_lane(asked.key).squeeze(1), self.by_lane(asked.value).squeeze(1)))
            taken = torch.cat([taken, torch.ones(len(query), asked.new, dtype=torch.bool)], 1)
        keys, values = (torch.cat(part, 1).double() for part in zip(*pieces, strict=True))
        total, queries = keys.shape[1], query.shape[2]
        seen = (torch.arange(total) <= torch.arange(total - queries, total)[:, None])[None, None]
        real = torch.ones(1, 1, queries, dtype=torch.bool)
        if self.visible is not None:
            seen, real = seen & self.visible, self.visible[..., -queries:].squeeze(1)
        scores = torch.einsum("lhqd,lsd->lhqs", query.double(), keys) * asked.scaling
        left = scores.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(taken[:, None, None], 0).sum(-1)
        own_scores = scores.masked_fill(~(seen & taken[:, None, None]), float("-inf"))
        own_output = torch.einsum("lhqs,lsd->lhqd", own_scores.softmax(-1), values)
        keep = real.expand(left.shape)
        error = (output.double() - own_output).abs()[keep].max()
        calls.append(Call(self.index, float(left[keep].max()), bound, taken, float(error)))
        return output, lse

    patch = pytest.MonkeyPatch()
    patch.setattr(SelectiveLayer, "_recall", recall)
    patch.setattr(SelectiveLayer, "_chosen_pages", chosen)
    try:
        yield calls
    finally:
        patch.undo()


def assert_held(calls: list[Call]) -> None:
    assert calls
    for call in calls:
        assert call.true <= call.bound + 1e-5
        assert call.error < 2e-4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != LATENT])
def test_the_certificate_holds(family: str, method: str) -> None:
    """Chunks, short steps and single tokens of a padded batch, and after a rollback."""
    model, ids = tiny(family), prompt(3, 130)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 7, 40)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    cache = KeepCache(model, method, BUDGET, checkpoint="kv", where="host")
    with watched() as calls:
        for low, high in (
            (0, 100),
            (100, 101),
            (101, 109),
            (109, 110),
            (110, 113),
            *((at, at + 1) for at in range(113, 123)),
        ):
            step(model, cache, ids[:, low:high], mask[:, :high])
        if not any(cache.is_sliding):
            cache.crop(-20)
            for low in range(103, 108):
                step(model, cache, ids[:, low : low + 1], mask[:, : low + 1])
    assert_held(calls)
    worst = {call.layer: max(other.bound for other in calls if other.layer == call.layer) for call in calls}
    assert {found.layer: found.worst for found in cache.certificate()} == worst
    for found in cache.certificate():
        assert found.last <= found.worst and found.recalled <= found.away
    if "certified" in method:
        share = float(method.rpartition(":")[2])
        assert max(worst.values()) <= share + 1e-5


@settings(max_examples=30, deadline=None, derandomize=True)
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
    model, generator = tiny("llama"), torch.Generator().manual_seed(seed)
    cache = KeepCache(model, method, BUDGET, checkpoint="kv", where="host", chunk=16)
    with watched() as calls:
        for count in (*chunks, *[1] * 6):
            with torch.no_grad():
                vectors = torch.randn(rows, count, 32, generator=generator) * scale
                model(inputs_embeds=vectors, past_key_values=cache, logits_to_keep=1)
    assert_held(calls)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("method", ["snapkv+pages:4", "snapkv+certified:0.1", "kv-lru"])
def test_the_certificate_holds_on_real_text(method: str) -> None:
    from kvkeep_lab.prompts import TEXT

    loaded = load("smollm2")
    ids = loaded.tokenizer(TEXT * 2, return_tensors="pt").input_ids[:, :700]
    cache = KeepCache(loaded.model, method, 96, checkpoint="kv", where="host")
    with watched() as calls:
        step(loaded.model, cache, ids[:, :-8])
        for place in range(ids.shape[1] - 8, ids.shape[1]):
            step(loaded.model, cache, ids[:, place : place + 1])
    assert_held(calls)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma4"])
def test_more_pages_leave_less_out(family: str) -> None:
    """In one and the same step, of the first layer: later ones are asked by other queries."""
    model, ids, bounds, before = tiny(family), prompt(2, 201), [], None
    for count in (1, 2, 3, 5, 7, "all"):
        cache = KeepCache(model, f"h2o+pages:{count}", BUDGET, checkpoint="kv", where="host")
        step(model, cache, ids[:, :200])
        with watched() as calls:
            step(model, cache, ids[:, 200:])
        bounds.append(calls[0].bound)
        assert before is None or (before <= calls[0].taken).all()
        before = calls[0].taken
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > 0 and bounds[-1] == 0


@pytest.mark.parametrize("method", ["h2o+pages:1", "kv-lru", "h2o+certified:0.9"])
def test_latent_attention_leaves_nothing_out(method: str) -> None:
    model, ids = tiny(LATENT), prompt(2, 60)
    cache, stock = KeepCache(model, method, BUDGET, checkpoint="kv", where="host"), KeepCache(model, "full")
    for low, high in ((0, 50), *((at, at + 1) for at in range(50, 60))):
        torch.testing.assert_close(
            step(model, cache, ids[:, low:high]), step(model, stock, ids[:, low:high]), atol=2e-4, rtol=2e-4
        )
    assert all(found.worst == 0 for found in cache.certificate())


def test_long_steps_leave_nothing_out() -> None:
    model, ids = tiny("llama"), prompt(1, 120)
    cache, stock = KeepCache(model, "h2o+pages:1", BUDGET, checkpoint="kv"), KeepCache(model, "full")
    for low in range(0, 120, FEW + 4):
        ours, theirs = (step(model, each, ids[:, low : low + FEW + 4]) for each in (cache, stock))
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    assert [found.worst for found in cache.certificate()] == [0.0] * 4


def test_kinds_give_the_same() -> None:
    """Entries and residuals, on any place, and a page of residuals smaller than what is recalled."""
    model, ids, found = tiny("llama"), prompt(2, 150), []
    for options in ({"checkpoint": "kv", "where": "disk"}, {"checkpoint": "residual", "where": "host", "page": 20}):
        cache = KeepCache(model, "h2o+pages:1", BUDGET, **options)
        found.append(
            torch.cat([step(model, cache, ids[:, low : low + 10 ** (low < 140)]) for low in range(0, 140, 10)])
        )
        found[-1] = torch.cat([found[-1], *(step(model, cache, ids[:, at : at + 1]) for at in range(140, 150))])
    torch.testing.assert_close(*found, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("recall", ["pages:2", "certified:0.1", "missed:8"])
def test_what_cannot_be_picked_is_refused(recall: str) -> None:
    for kind in ("tokens", "residual:2"):
        with pytest.raises(UsageError, match="'kv' or 'residual'"):
            KeepCache(tiny("llama"), f"h2o+{recall}", BUDGET, checkpoint=kind)
    with pytest.raises(UsageError, match="no fate but"):
        KeepCache(tiny("llama"), f"h2o+quantize:4+{recall}", 512)


@pytest.mark.parametrize(
    "text", ["pages:x", "pages:-1", "certified:1", "certified:-0.1", "missed:-1", "missed:limit=x"]
)
def test_parameters_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        KeepCache(tiny("llama"), f"h2o+{text}", BUDGET)


# -- entries that leave and come back ----------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", LATENT, "gemma4"])
@pytest.mark.parametrize("method", ["kv-lru", "h2o+verified:4", "knorm+pages:1"])
def test_evict_and_recall_by_hand(family: str, method: str) -> None:
    model, ids = tiny(family), prompt(2, 80)
    cache = KeepCache(model, method, BUDGET, checkpoint="kv", where="host")
    step(model, cache, ids[:, :70])
    backed = [layer for layer in cache.layers if isinstance(layer, LoggedLayer)]
    held = [layer.resident.held().sum(1) for layer in backed]
    cache.evict(3)
    for layer, before in zip(backed, held, strict=True):
        assert (layer.resident.held().sum(1) == before - 3).all()
    wanted = [layer.resident.held()[:, [5, 60, 61, 62]] for layer in backed]
    came = cache.recall([5, 60, 61, 62, 5])
    assert came == sum(int((~flags).sum()) for flags in wanted)
    for layer in backed:
        held_now = layer.resident.held()
        assert held_now[:, [5, 60, 61, 62]].all() and (held_now.sum(1) <= layer.budgets[0]).all()
        pieces = list(layer.log.recall(layer.index, layer.length))
        keys = torch.cat([piece[1] for piece in pieces], 2).flatten(0, 1)
        for bank in layer.resident.banks:
            lane, column = (bank.slots >= 0).nonzero(as_tuple=True)
            assert (bank.keys[lane, column] == bank.of(keys)[lane, bank.slots[lane, column].long()]).all()
    assert cache.recall([5, 60, 61, 62]) == 0
    assert all((cache.entry_states()[layer.index][..., 5] == EntryState.RESIDENT).all() for layer in backed)
    for at in range(70, 80):
        assert step(model, cache, ids[:, at : at + 1]).isfinite().all()
    cache.evict(10**6)
    assert not any(layer.resident.held().any() for layer in backed)
    assert step(model, cache, ids[:, :1]).isfinite().all()


def test_no_more_than_the_limit_comes_back() -> None:
    model, ids = tiny("llama"), prompt(1, 200)
    cache = KeepCache(model, "kv-lru", 100)
    step(model, cache, ids)
    cache.evict(100)
    lanes = 4 * 2
    assert cache.recall(range(150)) == 64 * lanes
    assert all(sorted(layer.resident.held().nonzero()[:, 1].tolist()) == sorted([*range(64)] * 2) for layer in layers(cache))
    assert cache.recall(range(150), limit=7) == 7 * lanes
    assert cache.recall(range(150, 200), limit=200) == 50 * lanes
    assert cache.recall(range(200), limit=0) == 0


def test_methods_without_all_entries_in_checkpoints_say_so() -> None:
    ids = prompt(1, 40)
    for method, options in (("h2o", {}), ("kv-direct", {}), ("h2o+checkpoint", {}), ("h2o+quantize:4+verified", {})):
        cache = KeepCache(tiny("llama"), method, 300, **options)
        step(tiny("llama"), cache, ids)
        for call in (lambda cache=cache: cache.evict(1), lambda cache=cache: cache.recall([0])):
            with pytest.raises(UsageError, match="kv-lru"):
                call()
        assert cache.certificate() == []
    cache = KeepCache(tiny("llama"), "h2o+verified", BUDGET, checkpoint="tokens")
    step(tiny("llama"), cache, ids)
    with pytest.raises(UsageError, match="tokens"):
        cache.recall([0])
    cache = KeepCache(tiny("llama"), "kv-lru", BUDGET)
    step(tiny("llama"), cache, ids)
    for call in (
        lambda: cache.recall([40]),
        lambda: cache.recall([-1]),
        lambda: cache.recall([0], -1),
        lambda: cache.evict(-1),
    ):
        with pytest.raises(UsageError):
            call()


@pytest.mark.parametrize("kind", ["kv", "residual"])
def test_a_ring_loses_what_falls_out_and_says_so(kind: str) -> None:
    model, ids = tiny("llama"), prompt(2, 90)
    cache = KeepCache(model, "kv-lru", BUDGET, checkpoint=kind, capacity=50)
    assert cache.spec is not None and cache.spec.where == "host"
    step(model, cache, ids[:, :50])
    assert cache.exactness == "reversible"
    for at in range(50, 70):
        step(model, cache, ids[:, at : at + 1])
    step(model, cache, ids[:, 70:90])
    assert cache.exactness == "lossy"
    first = 0 if kind == "kv" else 1  # the first layer's residuals follow from the ids, which are all there
    assert all(found.worst == 1.0 for found in cache.certificate()[first:])
    codes = torch.stack(cache.entry_states())[first:]
    assert (codes[..., :40] != EntryState.CHECKPOINTED).all() and (codes[..., :40] == EntryState.DROPPED).any()
    assert (codes[..., 40:] != EntryState.DROPPED).all()
    gone = [slot for slot in range(40) if (codes[..., slot] == EntryState.DROPPED).all()]
    assert gone and (cache.recall(gone) == 0) == (kind == "kv")


def test_a_long_step_attends_what_is_resident_though_the_log_has_lost_it() -> None:
    """A ring of as many entries as the budget: whatever is still somewhere is attended, once."""
    model, ids = tiny("llama"), prompt(1, 60)
    cache = KeepCache(model, "streaming-llm:positions=absolute+missed:0", BUDGET, checkpoint="kv", capacity=20)
    step(model, cache, ids[:, :40])
    layer = layers(cache)[0]
    held, seen = layer.resident.held().clone(), []
    assert held[:, :4].all() and layer.log.first(0) == 20
    own = layer.seen

    def told(slots: Tensor, *args: Any) -> Any:
        seen.append(slots.clone())  # they are written over when the step is settled
        return own(slots, *args)

    layer.seen = told
    step(model, cache, ids[:, 40:52])
    slots = torch.cat([part.long() for part in seen], 1)[0]
    slots = slots[slots >= 0].tolist()
    assert sorted(slots) == sorted({*range(4), *range(20, 40)})


# -- sessions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "method", "options"),
    [
        ("llama", "h2o+pages:1", {"checkpoint": "kv", "where": "disk"}),
        ("gemma3", "tova+certified:0.3", {"checkpoint": "residual", "where": "host"}),
        ("gpt2", "kv-lru", {"capacity": 40}),
        ("llama", "kv-lru", {"checkpoint": "residual"}),
        (LATENT, "kv-lru", {}),
    ],
)
def test_a_saved_cache_goes_on_as_if_it_had_never_left(
    tmp_path: Path, family: str, method: str, options: dict[str, Any]
) -> None:
    model, ids = tiny(family), prompt(2, 80)
    cache = KeepCache(model, method, BUDGET, **options)
    step(model, cache, ids[:, :60])
    step(model, cache, ids[:, 60:61])
    save_session(tmp_path / "s", Session(cache, ids[:, :61].tolist()))
    again = load_session(tmp_path / "s", model).cache
    assert again.certificate() == cache.certificate() and again.exactness == cache.exactness
    for low, high in ((61, 64), *((at, at + 1) for at in range(64, 72))):
        torch.testing.assert_close(step(model, again, ids[:, low:high]), step(model, cache, ids[:, low:high]))
    assert [found.worst for found in again.certificate()] == [found.worst for found in cache.certificate()]


def test_rows_chosen_while_padded_can_be_exchanged() -> None:
    """What is padding follows the rows."""
    model, ids = tiny("llama"), prompt(3, 60)
    mask = torch.ones_like(ids)
    ids[1, :30], mask[1, :30] = 0, 0
    cache = KeepCache(model, "kv-lru", BUDGET)
    step(model, cache, ids, mask)
    cache.batch_select_indices(torch.tensor([1, 2]))
    cache.crop(-5)
    cache.recall([2, 40])
    for layer in layers(cache):
        held = layer.resident.held().unflatten(0, (2, -1))
        assert not held[0, :, 2].any() and held[1, :, 2].all() and held[:, :, 40].all()
    cache.batch_select_indices(torch.tensor([1]))
    cache.recall([3])
    assert all(layer.resident.held()[:, 3].all() for layer in layers(cache))
