"""A layer: what the native library is pointed to, and what is handed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, tiny
from helpers import assert_near, bounded, prompt, step
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvkeep import KeepCache
from kvkeep.step import native
from kvkeep.step.native.entries import compiled
from kvkeep.step.plan import Span

METHODS = [
    ("window", 40),
    ("h2o", 40),
    ("kv-direct", 40),
    ("quantized:8", 200),
    ("snapkv+quantize:4", 120),
    ("revive", 100),
]
CHECKPOINTED = ("kv-direct", "h2o+checkpoint")
pytestmark = pytest.mark.usefixtures("kernels")


def tensors(span: Span) -> list[Tensor]:
    """The keys and values of a span, or their codes, scales and offsets."""
    parts = [
        part if isinstance(part, Tensor) else [getattr(part, name) for name in ("codes", "scale", "offset")]
        for part in (span.keys, span.values)
    ]
    return [one for part in parts for one in (part if isinstance(part, list) else [part])]


@pytest.mark.turns(2)
@pytest.mark.parametrize(("spec", "budget"), METHODS)
def test_the_library_reads_entries_where_they_lie(spec: str, budget: int) -> None:
    """What it is pointed to are the tensors that are counted, and no copies beside them."""
    config = FAMILIES["llama"]()
    config.head_dim = 16  # of codes the library reads whole vectors
    model = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    options: dict[str, Any] = {"checkpoint": "kv"} if spec == "kv-direct" else {}
    cache = KeepCache(model, spec, budget, chunk=32, **options)
    ids = prompt(1, 200, seed=4)
    for part in (*ids[:, :130].split(32, 1), *ids[:, 130:].split(1, 1)):
        step(model, cache, part)
    for layer in bounded(cache):
        counted = {part.untyped_storage().data_ptr() for part in layer.state().values()}
        counted |= {page.untyped_storage().data_ptr() for _, rows in cache.checkpoint_rows() for page in rows.pages}
        query = torch.zeros(layer.heads, 1, 1, 16).bfloat16()
        pieces = [*layer.evicted.pieces(query, layer.resident, layer.length), *layer.resident.pieces()]
        for keys, values, *_ in pieces:
            keys, values = (part[:, 0] if isinstance(part, Tensor) else part for part in (keys, values))
            assert native.can_attend(query, keys, values)
            for span in native.spans_of(keys, values):
                assert not compiled(span.keys, span.values).copies
                assert all(part.untyped_storage().data_ptr() in counted for part in tensors(span))


@pytest.mark.parametrize("spec", CHECKPOINTED)
def test_a_past_that_the_library_reads_in_pages_is_handed_on(spec: str) -> None:
    """In bfloat16, where a checkpoint's pages are one segment and no tensor."""
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"]()).bfloat16().eval()
    caches = KeepCache(model, spec, 16, chunk=32, checkpoint="kv"), KeepCache(model)
    for cache in caches:
        step(model, cache, prompt(1, 200, seed=4))
    for own, other in zip(caches[0].fork("full").layers, caches[1].layers, strict=True):
        assert_near(own.keys.float(), other.keys.float(), 0.05)
        assert_near(own.values.float(), other.values.float(), 0.05)


def test_a_bank_that_was_not_full_gives_no_empty_places() -> None:
    """What leaves are entries, so a store of few groups has room for as many of them."""
    cache = KeepCache(tiny("llama"), "h2o+quantize:8", 120, chunk=32)
    for part in prompt(1, 190, seed=5).split(32, 1):
        step("llama", cache, part)
    for layer in bounded(cache):
        (bank,) = layer.evicted.banks
        store = bank.store
        assert store.slots is not None and not store.gaps and bool((store.slots[:, : store.kept] >= 0).all())
