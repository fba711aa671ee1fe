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
USUAL = 8192
"""Tokens of a conversation that memory is taken for at most, where nothing is said of memory."""
SHARE = 4
"""At most this part of what is free is taken."""


def settled(service: Service, loaded: Loaded, conversations: int, processes: int = 1) -> Service:
    """Return ``service`` with what it names, else with memory for so many conversations in each of ``processes``, and
    an exact method for them. Says what it takes, and why."""
    memory = service.memory
    if memory is None:
        memory, why = modest(loaded, conversations, processes)
        note(why)
    return replace(service, memory=memory, cache=service.cache or planned(loaded, memory, conversations))


def modest(loaded: Loaded, conversations: int, processes: int = 1) -> tuple[int, str]:
    """Return the bytes for a process where nothing was said: for so many usual conversations with all their entries,
    but no more than the processes' part of what is free; and a line that says so."""
    from kvkeep.models.weight_memory import free_memory
    from kvkeep.units import size

    tokens, free = min(_positions(loaded), USUAL), free_memory(next(loaded.model.parameters()).device)
    wanted, limit = conversations * _whole(loaded, tokens), free // SHARE // processes
    kind = f"{conversations} conversations of {tokens:,} tokens"
    each = "" if processes == 1 else " for each replica"
    if wanted <= limit:
        return wanted, f"memory: {size(wanted)}{each}, for {kind} with all their entries (--memory for another)"
    part = "a quarter of" if processes == 1 else "this replica's part of a quarter of"
    return limit, (
        f"memory: {size(limit)}{each}, {part} the {size(free)} that are free; {kind} with all their entries would take "
        f"{size(wanted)} (--memory for another)"
    )


def settled_beforehand(service: Service, conversations: int, processes: int) -> Service:
    """Return what :func:`settled` does for each of several processes here. A model that is loaded for that is gone
    afterwards. Raises as loading does for one that cannot be served."""
    from kvkeep.models.loading import describe, load
    from kvkeep.native.library import trim_memory

    if service.memory is not None and service.cache:
        describe(service.model, weights=service.weights, device=service.device or "cpu", progress=note)
        return service
    loaded = load(service.model, weights=service.weights, device=service.device, progress=note)
    service = settled(service, loaded, conversations, processes)
    del loaded
    gc.collect()  # a model refers to itself
    trim_memory()
    return service


def planned(loaded: Loaded, total: int, conversations: int) -> dict[str, Any]:
    """Return ``full`` where so many conversations of all the model's positions fit with all their entries, else the
    planner's choice of exact caches for them. Raises UsageError where nothing fits."""
    from kvkeep.plan.planner import ANSWER, recommend

    positions, share = _positions(loaded), total // conversations
    if _whole(loaded, positions) <= share:
        return {"method": "full"}
    answer = min(ANSWER, positions // 2)
    try:
        choice = recommend(loaded.model, positions - answer, share, answer=answer)
    except BudgetError as error:
        raise UsageError(f"{error} Give more --memory, fewer --conversations, or a --method.") from error
    note(f"the planner chose '{choice.method}' among exact methods; times are {choice.rates}")
    return {name: value for name, value in choice.options().items() if value is not None}


def _positions(loaded: Loaded) -> int:
    """Return the tokens of the longest conversation."""
    from kvkeep.geometry import ModelGeometry

    return ModelGeometry.from_config(loaded.model.config, 2).max_positions or UNBOUNDED


def _whole(loaded: Loaded, tokens: int) -> int:
    """Return the bytes that a conversation of ``tokens`` tokens is granted with all its entries."""
    from kvkeep.cache import KeepCache
    from kvkeep.serve.arbiter import peak_bytes

    return peak_bytes(KeepCache(loaded.model, "full"), tokens)


def fitting(engine: Engine) -> str:
    """Return, in a sentence, what sessions are that name nothing, and how many of them fit."""
    from kvkeep.cache import KeepCache

    cache, tokens = KeepCache(engine.model, **engine.cache), engine.geometry.max_positions or UNBOUNDED
    kind = f"'{cache.method.name}'" + ("" if cache.entries is None else f" with {cache.entries} entries a layer")
    fit = engine.arbiter.fitting(cache, tokens)
    if not fit:
        return f"by default {kind} ({cache.exactness}): none of {tokens:,} tokens fits, only shorter conversations"
    return f"by default {kind} ({cache.exactness}): {fit} conversations of {tokens:,} tokens at once, and more in turns"
