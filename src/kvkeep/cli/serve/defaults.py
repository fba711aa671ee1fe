"""What sessions are that name nothing, and how many bytes they all have: as given, or the planner's choice."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvkeep.cli.output import note
from kvkeep.errors import BudgetError, UsageError

if TYPE_CHECKING:
    from kvkeep.models.loading import Loaded
    from kvkeep.serve.engine import Engine
    from kvkeep.serve.service import Service

UNBOUNDED = 8192
"""Tokens of a conversation that is planned for, where a model has no number of positions."""


def settled(service: Service, loaded: Loaded, conversations: int, processes: int = 1) -> Service:
    """Return ``service`` with what it names, else with half of what is free for all ``processes``, and the planner's
    choice for so many conversations."""
    from kvkeep.models.room import free_memory

    memory = service.memory
    if memory is None:
        memory = free_memory(next(loaded.model.parameters()).device) // 2 // processes
    return replace(service, memory=memory, cache=service.cache or planned(loaded, memory, conversations))


def settled_beforehand(service: Service, conversations: int, processes: int) -> Service:
    """Return what :func:`settled` does for each of several processes here. A model that is loaded for that is gone
    afterwards. Raises as loading does for one that cannot be served."""
    from kvkeep.models.freed import give_back
    from kvkeep.models.loading import describe, load

    if service.memory is not None and service.cache:
        describe(service.model, weights=service.weights, device=service.device or "cpu", progress=note)
        return service
    loaded = load(service.model, weights=service.weights, device=service.device, progress=note)
    service = settled(service, loaded, conversations, processes)
    del loaded
    gc.collect()  # a model refers to itself
    give_back()
    return service


def planned(loaded: Loaded, total: int, conversations: int) -> dict[str, Any]:
    """Return the planner's choice of exact caches for so many conversations of as many tokens as there are positions.
    Raises UsageError where nothing fits."""
    from kvkeep.geometry import ModelGeometry
    from kvkeep.plan.planner import ANSWER, recommend

    positions = ModelGeometry.from_config(loaded.model.config, 2).max_positions or UNBOUNDED
    answer = min(ANSWER, positions // 2)
    try:
        choice = recommend(loaded.model, positions - answer, total // conversations, answer=answer, tell=note)
    except BudgetError as error:
        raise UsageError(f"{error} Give more --memory, fewer --conversations, or a --method.") from error
    return {name: value for name, value in choice.options().items() if value is not None}


def fitting(engine: Engine) -> str:
    """Return, in a sentence, what sessions are that name nothing, and how many of them fit."""
    from kvkeep.cache import KeepCache

    cache, tokens = KeepCache(engine.model, **engine.cache), engine.geometry.max_positions or UNBOUNDED
    kind = f"'{cache.method.name}'" + ("" if cache.entries is None else f" with {cache.entries} entries a layer")
    fit = engine.arbiter.fitting(cache, tokens)
    if not fit:
        return f"by default {kind} ({cache.exactness}): none of {tokens:,} tokens fits, only shorter conversations"
    return f"by default {kind} ({cache.exactness}): {fit} conversations of {tokens:,} tokens at once, and more in turns"
