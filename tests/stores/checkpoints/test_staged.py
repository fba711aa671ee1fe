"""``kv-direct`` with entries in the host's memory, for a model on a GPU: on the pretended one.

Attention is exact sums here: in double precision, and then rounded. So results do not depend on where entries lie, and
are compared to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from families import VOCABULARY, tiny
from helpers import allocated, broken, counted
from pretended_gpu import GPU, PretendedGpu, on_gpu
from torch import Tensor
from transformers import LlamaConfig
from watched_streams import watched_streams

from kvkeep import KeepCache, transfer
from kvkeep.geometry import ModelGeometry
from kvkeep.plan.sizes import sizes
from kvkeep.step import torch as plain
from kvkeep.step.plan import Segment
from kvkeep.stores import layer
from kvkeep.stores.checkpoints import staged
from kvkeep.stores.readers import backed

LAYERS = 3
TEXT = torch.randint(1, VOCABULARY, (2, 700), generator=torch.Generator().manual_seed(0))
CHUNKS = [90, 64, 100, *[1] * 5, 30, *[1] * 12]


def exact_sums(
    query: Tensor,
    segments: Iterable[Segment],
    scaling: float,
    sinks: Tensor | None = None,
    origin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`kvkeep.attention.attend` in double precision."""
    scores, values = [], []
    for one in segments:
        found = query.double() @ one.key.double().transpose(2, 3) * scaling
        if one.causal:
            found = found.masked_fill(torch.ones(found.shape[2:], dtype=torch.bool, device=GPU).triu(1), float("-inf"))
        if one.mask is not None:
            seen = one.mask if one.mask.dtype == torch.bool else one.mask > -1e30
            found = found.masked_fill(~seen, float("-inf"))
        scores.append(found)
        values.append(one.value.double().expand(*found.shape[:1], found.shape[1], -1, -1))
    together = torch.cat(scores, 3)
    lse = together.logsumexp(3)
    weights = (together - lse[..., None]).exp().nan_to_num(0.0)
    return (weights @ torch.cat(values, 2)).to(query.dtype), lse.float()


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    for module in (layer, backed):
        monkeypatch.setattr(module, "attend", exact_sums)
    monkeypatch.setattr(plain, "combined", exact_sums)
    with PretendedGpu() as entered, watched_streams() as races:
        yield entered
        assert not races


@pytest.fixture
def model(gpu: PretendedGpu) -> Any:
    return on_gpu(deepcopy(tiny("llama", LAYERS, 1024)))


def cache_of(model: Any, budget: int = 64, method: str = "kv-direct", **options: Any) -> KeepCache:
    return KeepCache(model, method, budget, **{"checkpoint": "kv", "where": "host", **options})


def read(model: Any, cache: KeepCache, start: int, counts: Iterable[int], rows: int = 1, **options: Any) -> Tensor:
    """Return the last logits of each pass over the text from ``start`` on."""
    logits = []
    with torch.no_grad():
        for count in counts:
            ids = TEXT[:rows, start : start + count].to(GPU)
            logits.append(model(ids, cache=cache, logits_to_keep=1, **options).logits)
            start += count
    return torch.cat(logits, 1).cpu()


# -- the same results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget,rows", [(0, 1), (20, 2), (64, 1), (160, 2)])
def test_logits_have_the_bits_of_a_cache_that_evicts_nothing(model: Any, budget: int, rows: int) -> None:
    whole = cache_of(model, 400, where="device", chunk=100)
    expected = read(model, whole, 0, CHUNKS, rows)
    staged = cache_of(model, budget, chunk=100)
    assert torch.equal(read(model, staged, 0, CHUNKS, rows), expected)
    for one, other in zip(staged.layers, whole.layers, strict=True):
        for mine, yours in zip(one.everything(), other.everything(), strict=True):
            assert torch.equal(mine, yours)


def test_padding_is_masked_by_slot(model: Any) -> None:
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[0, :70] = 0
    logits = []
    for where in ("device", "host"):
        cache, start = cache_of(model, where=where, chunk=100), 0
        for count in (100, 100, 100, *[1] * 8):
            stop = start + count
            given = {
                "attention_mask": mask[:, :stop].to(GPU),
                "position_ids": (mask.cumsum(1) - 1)[:, start:stop].clamp(0).to(GPU),
            }
            logits.append(read(model, cache, start, [count], 2, **given))
            start = stop
    assert torch.equal(torch.cat(logits[:11], 1), torch.cat(logits[11:], 1))


@pytest.mark.parametrize("method", ["window+verified", "h2o+checkpoint"])
def test_checkpoints_that_hold_every_entry(model: Any, method: str) -> None:
    options = {} if method.endswith("verified") else {"chunk": 60}
    given = [cache_of(model, 100, method, where=where, **options) for where in ("device", "host")]
    expected, found = (read(model, cache, 0, [60, 60, *[1] * 10]) for cache in given)
    assert torch.equal(found, expected)


def test_a_second_reading_takes_entries_out_of_the_buffers(model: Any) -> None:
    logits = []
    for where in ("device", "host"):
        cache = cache_of(model, 60, "kvzip:sinks=2+checkpoint:kv", where=where)
        read(model, cache, 0, [60, 60, 40])
        cache.compress()
        logits.append(read(model, cache, 160, [1, 1]))
    assert torch.equal(*logits)


CHANGES: dict[str, Callable[[Any, KeepCache], KeepCache]] = {
    "crop in the ring": lambda model, cache: cut(cache, 10),
    "crop in a block": lambda model, cache: cut(cache, 75),
    "crop to a part": lambda model, cache: cut(cache, 220),
    "reorder": lambda model, cache: reordered(cache, [1, 0]),
    "repeat": lambda model, cache: reordered(cache, [1, 1]),
    "fewer rows": lambda model, cache: reordered(cache, [1]),
    "fork": lambda model, cache: transfer.fork(cache, None),
    "save and restore": lambda model, cache: restored(model, cache),
    "interrupted": lambda model, cache: interrupted(model, cache),
}


def cut(cache: KeepCache, count: int) -> KeepCache:
    cache.crop(-count)
    return cache


def reordered(cache: KeepCache, rows: list[int]) -> KeepCache:
    cache.reorder_cache(torch.tensor(rows))
    return cache


def restored(model: Any, cache: KeepCache) -> KeepCache:
    twin = KeepCache(model, request=cache.request)
    state = {name: one.cpu().clone() for name, one in transfer.state(cache).items()}
    transfer.restore(twin, {*state}, state.__getitem__, transfer.header(cache))
    return twin


def interrupted(model: Any, cache: KeepCache) -> KeepCache:
    with broken(model, 2, KeyboardInterrupt):
        read(model, cache, cache.get_seq_length(), [100], cache.rows)
    return cache


@pytest.mark.turns(3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_bits_after_a_change_in_the_middle_of_a_block(model: Any, change: str, steps: int) -> None:
    """Entries leave the device in blocks of 4: with ``steps`` decoded tokens, one block is complete, or none."""
    logits = []
    for where in ("device", "host"):
        cache = cache_of(model, 80, where=where, chunk=100)
        assert where == "device" or (cache.checkpoint is not None and cache.checkpoint.block == 4)
        read(model, cache, 0, [100, 100, 50, *[1] * steps], 2)
        changed = CHANGES[change](model, cache)
        length = changed.get_seq_length()
        logits.append(read(model, changed, length, [1, 1, 30, *[1] * 5], changed.rows))
    assert torch.equal(*logits)


# -- copies and waits -------------------------------------------------------------------------------------


def test_a_step_waits_for_nothing_and_copies_each_entry_once(model: Any, gpu: PretendedGpu) -> None:
    cache = cache_of(model, 320, chunk=160, page=16)
    read(model, cache, 0, [160, 160, 160, 1, 1])
    width = 2 * 2 * 8 * 4
    for start in range(482, 530):
        gpu.clear()
        evicted = cache.layers[0].resident.evicted
        read(model, cache, start, [1])
        left = cache.layers[0].resident.evicted - evicted
        assert left in (0, 32) and not [one for one in gpu.waits if "stores/" in one or "memory/" in one], gpu.waits
        assert set(gpu.copies) <= {"to device, pinned", "to host, pinned", "to host, pageable", "to device, pageable"}
        assert gpu.copied_bytes["to host, pinned"] == LAYERS * left * width
        rows = gpu.copied_bytes["to device, pinned"] // width
        assert rows <= LAYERS * (evicted + left) + 40, "no entry is copied twice, but those of one buffer ahead"
    assert cache.layers[0].resident.evicted > 100


def test_the_first_entries_of_the_next_layer_are_copied_while_a_layer_computes(model: Any) -> None:
    cache = cache_of(model, 64, chunk=100, page=16)
    read(model, cache, 0, [100, 100, 1])
    order: list[tuple[int, int]] = []
    staging: Any = cache.checkpoint._staging  # type: ignore[union-attr]
    fetched = staging._fetched
    staging._fetched = lambda layer, start, stop: order.append((layer, start)) or fetched(layer, start, stop)
    reading = staging.read
    staging.read = lambda layer, stop: order.append((layer, -1)) or reading(layer, stop)
    read(model, cache, 201, [1])
    begins = [order.index((number, -1)) for number in range(LAYERS)]
    assert all(order[begin - 1] == (number, 0) for number, begin in enumerate(begins) if number)
    assert order[-1] == (0, 0)  # for the next token


# -- memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [16, 40, 64, 200, 320])
def test_the_budget_counts_the_buffers_and_a_plan_knows_all_bytes(model: Any, budget: int) -> None:
    geometry = ModelGeometry.of(model)
    for count, steps in ((30, 0), (min(5 * budget, 350), 3), (budget + 90, 1)):
        cache = cache_of(model, budget)
        read(model, cache, 0, [*cache.stream.chunks(count), *[1] * steps])
        memory = cache.memory()
        held = memory.resident_bytes + memory.checkpoint_bytes["device"]
        assert held <= budget * geometry.full_bytes_per_token
        predicted = sizes(geometry, cache.method, count, budget, cache.spec, shared=False, steps=steps)
        assert memory.resident_bytes == predicted.resident
        assert memory.checkpoint_bytes == {"device": predicted.device, "host": predicted.host, "disk": 0}
        assert memory.peak_workspace_bytes == predicted.workspace == 0
        assert cache.layers[0].resident.evicted == predicted.evicted
        assert allocated(cache) == counted(cache)


def test_sizes_of_llama_3_1_8b() -> None:
    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    geometry = ModelGeometry.from_config(config, 2)
    for budget, entries, block, rows in ((2048, 256, 128, 2730), (16_384, 768, 256, staged.LONGEST), (64, 32, 4, 341)):
        assert staged.staged_entries(budget, geometry, 512) == entries
        assert staged.evicted_together(budget - entries) == block
        assert staged.buffer_elements(geometry, entries, 512)[0] // 256 == rows
