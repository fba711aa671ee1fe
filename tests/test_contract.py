"""The contract: what every method promises on every family, checked against transformers' own cache."""

from __future__ import annotations

from functools import cache as memoised
from typing import Any

import pytest
import torch
from families import FAMILIES, REFUSES, VOCABULARY, tiny
from transformers import DynamicCache, set_seed

from kvkeep import KeepCache, UnsupportedModelError
from kvkeep.stores.layer import Layer

PROMPT, NEW = 45, 12
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "static": ("static", {"budget": 200}),
    "paged": ("paged", {}),
    "kv-0": ("kv-direct", {"budget": 0, "chunk": 7, "checkpoint": "kv", "where": "host"}),
    "kv-16": ("kv-direct", {"budget": 16, "checkpoint": "kv", "where": "disk"}),
    "residual-16": ("kv-direct", {"budget": 16, "chunk": 5, "checkpoint": "residual", "where": "host", "page": 6}),
    "residual:3-16": ("kv-direct", {"budget": 16, "checkpoint": "residual:3", "where": "host", "page": 6}),
    "tokens-16": ("kv-direct", {"budget": 16, "chunk": 11, "checkpoint": "tokens", "where": "device", "page": 6}),
    # Any selector with checkpoints is exact, and so is any method that never had to let anything go.
    "window+kv": ("window+checkpoint:kv", {"budget": 16, "where": "disk"}),
    "streaming-llm+residual": ("streaming-llm+checkpoint:residual", {"budget": 16, "where": "host", "page": 6}),
    "h2o+kv": ("h2o+checkpoint:kv", {"budget": 16, "where": "host"}),
    "h2o+kv-0": ("h2o+checkpoint:kv", {"budget": 0, "chunk": 7, "where": "host"}),
    "snapkv+kv": ("snapkv:window=4,kernel=3+checkpoint:kv", {"budget": 17, "chunk": 9, "where": "device"}),
    "tova+residual": ("tova+checkpoint:residual", {"budget": 16, "where": "host", "page": 6}),
    "pyramidkv+kv": ("pyramidkv:window=4,kernel=3+checkpoint:kv", {"budget": 24, "chunk": 11, "where": "host"}),
    "knorm+residual:3": ("knorm+checkpoint:residual:3", {"budget": 16, "where": "host", "page": 6}),
    "random+tokens": ("random+checkpoint:tokens", {"budget": 16, "where": "device", "page": 6}),
    "duo-attention+kv": ("duo-attention:sinks=2+checkpoint:kv", {"budget": 16, "where": "host"}),
    "h2o+segments": ("h2o+segments:99", {"budget": 16}),
    # Whatever drafts, the forward pass itself is exact; tests/decode/test_verified.py decodes in rounds.
    "snapkv+verified": ("snapkv:window=4,kernel=3+verified:5", {"budget": 17, "chunk": 9, "where": "host"}),
    "window+residual+verified": ("window+checkpoint:residual+verified:3", {"budget": 16, "where": "disk", "page": 6}),
    "h2o+certified": ("h2o+certified:0", {"budget": 16, "checkpoint": "kv", "where": "host"}),
    "snapkv+pages": (
        "snapkv:window=4,kernel=3+checkpoint:residual+pages:all",
        {"budget": 17, "chunk": 9, "where": "host", "page": 6},
    ),
    "duo-attention+pages": ("duo-attention:sinks=2+pages:all", {"budget": 16, "checkpoint": "kv", "where": "disk"}),
    "lru, roomy": ("kv-lru", {"budget": 200, "capacity": 300}),
    "h2o, roomy": ("h2o", {"budget": 200}),
    "snapkv, roomy": ("snapkv", {"budget": 200, "chunk": 20}),
}
EVERY = [(family, method) for family in FAMILIES for method in METHODS]
# Where one property is like another: each method on a third of the families, each family with a third of the methods.
SOME = [
    (family, method)
    for row, family in enumerate(FAMILIES)
    for column, method in enumerate(METHODS)
    if (row + column) % 3 == 0
]


def new_cache(family: str, method: str) -> KeepCache:
    name, options = METHODS[method]
    kind = str(options.get("checkpoint", name.partition("+checkpoint:")[2]))
    if kind in REFUSES.get(family, ()):
        with pytest.raises(UnsupportedModelError, match=tiny(family).config.model_type):
            KeepCache(tiny(family), name, **options)
        pytest.skip(f"{family} refuses {kind}, by name")
    return KeepCache(tiny(family), name, **options)


def prompt(rows: int = 1, length: int = PROMPT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(2, VOCABULARY, (rows, length), generator=generator)


def padded(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different length, padded at the left."""
    ids, mask = prompt(rows), torch.ones(rows, PROMPT, dtype=torch.long)
    for row in range(rows):
        ids[row, : 9 * row], mask[row, : 9 * row] = 0, 0
    return ids, mask


def generate(family: str, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> Any:
    mask = torch.ones_like(ids) if mask is None else mask
    set_seed(5)
    return tiny(family).generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
        **({"do_sample": False} | options),
    )


@memoised
def stock(family: str, rows: int, *options: tuple[str, Any]) -> Any:
    ids, mask = (prompt(), None) if rows == 1 else padded(rows)
    return generate(family, DynamicCache(config=tiny(family).config), ids, mask, **dict(options))


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for mine, yours in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(mine, yours, atol=2e-4, rtol=2e-4)


def held_within_budget(cache: KeepCache) -> None:
    """Resident entries never exceed the budget, measured from the tensors themselves."""
    if cache.entries is None:
        return
    for layer, report in zip(cache.layers, cache.describe(), strict=True):
        if cache.budgets is not None and isinstance(layer, Layer):
            lanes = sum(bank.slots.numel() for bank in layer.resident.banks)
            assert lanes <= layer.rows * sum(layer.resident.banks.budgets) * (
                layer.heads // len(layer.resident.banks.budgets)
            )
        elif report.kind == "full" and report.effective == "kv-direct":
            held = [rows.data for rows in (layer.resident._keys, layer.resident._values) if rows.data is not None]
            assert all(tensor.shape[-2] <= cache.entries for tensor in held)


@memoised
def _stock_errs_on_sliced_queries(family: str) -> bool:
    """Gemma 4 computes only the last queries of its shared layers, and transformers 5.23 then masks them as if they
    were the first. kvkeep's own attention does not; methods that leave attention to transformers do as it does."""
    model, ids = tiny(family), prompt()
    with torch.no_grad():
        whole = model(ids, past_key_values=DynamicCache(config=model.config)).logits[:, -9:]
        last = model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=9).logits
    return not torch.allclose(whole, last, atol=2e-4, rtol=2e-4)


def skip_where_stock_errs(family: str, method: str) -> None:
    if method in ("full", "static") and _stock_errs_on_sliced_queries(family):
        pytest.skip(f"transformers' own {family} is wrong here, and '{method}' uses its attention")


@pytest.mark.parametrize(("family", "method"), EVERY)
def test_greedy_equals_stock(family: str, method: str) -> None:
    cache = new_cache(family, method)
    assert_same(generate(family, cache, prompt()), stock(family, 1))
    held_within_budget(cache)
    assert cache.get_seq_length() == PROMPT + NEW - 1


@pytest.mark.parametrize(("family", "method"), EVERY)
def test_left_padded_batch_equals_stock(family: str, method: str) -> None:
    cache = new_cache(family, method)
    assert_same(generate(family, cache, *padded()), stock(family, 3))
    held_within_budget(cache)


@pytest.mark.parametrize(("family", "method"), SOME)
def test_beams_equal_stock(family: str, method: str) -> None:
    options = (("num_beams", 3), ("num_return_sequences", 2))
    ours = generate(family, new_cache(family, method), *padded(2), **dict(options))
    assert ours.sequences.tolist() == stock(family, 2, *options).sequences.tolist()


@pytest.mark.parametrize(("family", "method"), SOME)
def test_sampling_equals_stock(family: str, method: str) -> None:
    options = (("do_sample", True), ("temperature", 0.7), ("top_k", 0))
    ours = generate(family, new_cache(family, method), *padded(2), **dict(options))
    assert ours.sequences.tolist() == stock(family, 2, *options).sequences.tolist()


@pytest.mark.parametrize(("family", "method"), SOME)
def test_assisted_decoding_equals_stock(family: str, method: str) -> None:
    """Prompt lookup drafts tokens, most are rejected, and the cache is rolled back."""
    skip_where_stock_errs(family, method)
    ours = generate(family, new_cache(family, method), prompt().repeat(1, 2), prompt_lookup_num_tokens=4)
    theirs = generate(family, DynamicCache(config=tiny(family).config), prompt().repeat(1, 2))
    assert ours.sequences.tolist() == theirs.sequences.tolist()


@pytest.mark.parametrize(("family", "method"), SOME)
def test_several_turns_on_one_cache(family: str, method: str) -> None:
    ours, theirs = new_cache(family, method), DynamicCache(config=tiny(family).config)
    conversation = prompt()
    for turn in range(3):
        question = torch.cat([conversation, prompt(1, 6 + turn)], dim=1)
        mine, yours = generate(family, ours, question), generate(family, theirs, question)
        assert_same(mine, yours)
        conversation = yours.sequences
    held_within_budget(ours)


@pytest.mark.parametrize(("family", "method"), SOME)
def test_every_logit_of_a_long_input(family: str, method: str) -> None:
    """A prompt taken in chunks still returns the outputs of all its positions."""
    skip_where_stock_errs(family, method)
    model, ids = tiny(family), prompt(2)
    with torch.no_grad():
        ours = model(ids, past_key_values=new_cache(family, method)).logits
        last = model(ids, past_key_values=new_cache(family, method), logits_to_keep=9).logits
        theirs = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(last, theirs[:, -9:], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("family", "method"), EVERY)
def test_crop_select_repeat_reset(family: str, method: str) -> None:
    """After any of them the next step is what it is on a cache that never saw the rest."""
    model, ids = tiny(family), prompt(3)
    cache = new_cache(family, method)

    def step(cache: Any, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, past_key_values=cache, logits_to_keep=1).logits

    def expected(tokens: torch.Tensor) -> torch.Tensor:
        return step(DynamicCache(config=model.config), tokens)

    cache.activate_past_recording()
    step(cache, ids[:, :30])
    step(cache, ids[:, 30:40])
    cache.crop(-9)  # deeper than what is resident would also do; sliding windows record one round only
    assert cache.get_seq_length() == 31
    torch.testing.assert_close(step(cache, ids[:, 31:33]), expected(ids[:, :33]), atol=2e-4, rtol=2e-4)
    cache.crop(0)
    order = torch.tensor([2, 0, 1])
    cache.reorder_cache(order)
    torch.testing.assert_close(step(cache, ids[order, 33:34]), expected(ids[order, :34]), atol=2e-4, rtol=2e-4)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    cache.batch_repeat_interleave(2)
    rows = order[torch.tensor([0, 0, 2, 2])]
    torch.testing.assert_close(step(cache, ids[rows, 34:36]), expected(ids[rows, :36]), atol=2e-4, rtol=2e-4)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(step(cache, ids[:1, :5]), expected(ids[:1, :5]), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("family", "method"), SOME)
def test_rows_of_a_batch_do_not_see_each_other(family: str, method: str) -> None:
    ids = prompt(2)
    other = torch.cat([ids[:1], prompt(3)[2:]])
    mine = generate(family, new_cache(family, method), ids).sequences[0]
    assert mine.tolist() == generate(family, new_cache(family, method), other).sequences[0].tolist()


@pytest.mark.parametrize(("family", "method"), SOME)
def test_memory_is_what_is_allocated(family: str, method: str) -> None:
    """The reported bytes are those of the tensors that can be reached from the cache."""
    cache = new_cache(family, method)
    generate(family, cache, prompt())
    memory, seen = cache.memory(), {}

    def walk(value: Any, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                walk(item, depth + 1)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item, depth + 1)
        elif (
            type(value).__module__.startswith(("kvkeep", "transformers.cache_utils"))
            and type(value).__name__ not in ("Adapter", "Request")
            and depth < 20
        ):
            walk(dict(vars(value)), depth + 1)

    walk(cache)
    told = (
        memory.resident_bytes
        + memory.compressed_bytes
        + sum(memory.checkpoint_bytes.values())
        + memory.bookkeeping_bytes
    )
    windows = 8 * sum(cache.is_sliding)  # each sliding layer keeps its width in a one-element tensor
    assert told == sum(seen.values()) - windows
    assert memory.peak_cache_bytes >= memory.resident_bytes
