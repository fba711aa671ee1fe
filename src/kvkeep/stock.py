"""The cache of transformers, as method "stock", measured like kvkeep's."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache, DynamicCache

from kvkeep.cache import KeepCache
from kvkeep.memory.meter import Memory, resident_now
from kvkeep.policies.methods import requested
from kvkeep.stores.dynamic import StockState


def new_cache(model: Any, method: str | None = None, budget: Any = None, **options: Any) -> Cache:
    """Return a :class:`KeepCache`, or the default cache of transformers for method "stock", the baseline."""
    request = requested(method, budget, **options)
    return DynamicCache(config=model.config) if request is None else KeepCache(model, request=request)


def memory_of(cache: Any) -> Memory:
    """Return the bytes of any cache, by its ``memory`` method or :func:`account`."""
    measured = getattr(cache, "memory", None)
    return account(cache) if measured is None else measured()


def account(cache: Cache) -> Memory:
    """Return the bytes of one of transformers' caches; a step copies its largest layer, which is workspace."""
    sizes = [StockState(layer).resident_bytes for layer in cache.layers]
    total = sum(sizes)
    return Memory(
        resident_bytes=total,
        peak_cache_bytes=total,
        peak_workspace_bytes=max(sizes, default=0),
        process_bytes=resident_now(),
    )
