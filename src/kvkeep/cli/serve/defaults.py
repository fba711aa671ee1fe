"""The memory of a server, and the default cache of its sessions: given by the user, or chosen by what fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvkeep.budget import size
from kvkeep.cache import KeepCache
from kvkeep.cli.output import note
from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.loading import Loaded
from kvkeep.models.weight_memory import free_memory
from kvkeep.plan.fitting import choose
from kvkeep.plan.sizes import grant
from kvkeep.policies.methods import resolve
from kvkeep.policies.names import Pin
from kvkeep.serve.engine import Engine
from kvkeep.serve.service import Service

PLANNED_TOKENS = 8192
"""Maximum tokens of a conversation for which memory is reserved by default, and its tokens if the model has no maximum
number of positions."""
MEMORY_SHARE = 4
"""The default memory is at most 1/MEMORY_SHARE of the free memory."""


def with_defaults(service: Service, loaded: Loaded, conversations: int) -> Service:
    """Return ``service`` with its memory and cache. Missing values are chosen for ``conversations``. Print each choice
    and its reason."""
    memory = service.memory
    if memory is None:
        memory, reason = default_memory(loaded, conversations)
        note(reason)
    return replace(service, memory=memory, cache=service.cache or default_cache(loaded, memory, conversations))


def default_memory(loaded: Loaded, conversations: int) -> tuple[int, str]:
    """Return the bytes of a server, and a line that explains them: space for ``conversations`` with all their entries,
    at most a part of the free memory."""
    geometry, free = ModelGeometry.of(loaded.model), free_memory(next(loaded.model.parameters()).device)
    tokens = min(geometry.max_positions or PLANNED_TOKENS, PLANNED_TOKENS)
    wanted = conversations * grant(geometry, resolve("full"), None, tokens)
    limit = free // MEMORY_SHARE
    load = f"{conversations} conversations of {tokens:,} tokens with all their entries"
    if wanted <= limit:
        return wanted, f"memory: {size(wanted)}, enough for {load} (change it with --memory)"
    return limit, (
        f"memory: {size(limit)}, a quarter of the {size(free)} that are free; {load} would need {size(wanted)} "
        "(change it with --memory)"
    )


def default_cache(loaded: Loaded, memory: int, conversations: int) -> dict[str, Any]:
    """Return the options of the cache that :func:`~kvkeep.plan.fitting.choose` takes for each of ``conversations`` of
    the maximum length, and print the choice. Raises UsageError if nothing fits."""
    geometry = ModelGeometry.of(loaded.model)
    try:
        choice = choose(geometry, geometry.max_positions or PLANNED_TOKENS, memory // conversations, shared=True)
    except BudgetError as error:
        raise UsageError(f"{error} Give more --memory, fewer --conversations, or a --method.") from error
    note(f"each of {conversations} conversations: {choice.reason}")
    return choice.options


def describe_default(engine: Engine, pin: Pin | None = None) -> str:
    """Return a line on the default cache, and how many conversations of the maximum length fit with it. pin: the tokens
    of each prompt that are pinned."""
    cache, tokens = KeepCache(engine.model, **engine.cache), engine.geometry.max_positions or PLANNED_TOKENS
    entries = "" if cache.entries is None else f" with {cache.entries} entries per layer"
    promise = cache.exactness if cache.exact_tokens is None else f"exact up to {cache.exact_tokens:,} tokens"
    name = f"default cache: '{cache.method.name}'{entries} ({promise})"
    if engine.capacity is not None:
        name += f"; sessions of endless store at most {engine.capacity:,} older tokens"
    if pin is not None and cache.method.exactness is Exactness.EXACT:
        name += "; it loses no entry, so --pin only matters to requests that name a lossy method"
    if fitting := engine.arbiter.fitting(cache, tokens):
        return f"{name}; {fitting} conversations of {tokens:,} tokens fit at once, more take turns"
    return f"{name}; a conversation of {tokens:,} tokens does not fit, only shorter ones do"
