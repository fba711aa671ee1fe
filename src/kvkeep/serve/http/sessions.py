"""Routes of sessions, and of what their caches hold: methods, memory, and the state of each token."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
from fastapi import APIRouter, Query, Request
from torch import Tensor

from kvkeep.blocks.store import UNSAVED, SessionInfo, Store
from kvkeep.contracts.entries import EntryState
from kvkeep.errors import SessionError, SessionUnwritable, UsageError
from kvkeep.policies.methods import Request as CacheRequest
from kvkeep.policies.methods import methods
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.body import json_response
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.session import Name, bytes_by_kind, check_name
from kvkeep.serve.session_storage import SessionStorage

T = TypeVar("T")
ENGINE_TIMEOUT_S = 30.0
"""Seconds to wait for the end of the engine's step."""
MAX_TEXTS = 20_000
"""The maximum number of tokens of a cache that is returned with their texts."""
NEVER_SAVED, UNREADABLE = "Its first turn was never saved.", "The session cannot be read."


def session_routes(
    engine: Engine,
    token_texts: Callable[[Sequence[int]], tuple[list[str], list[int]]],
    forget: Callable[[str, str], None],
) -> APIRouter:
    """Return the routes. token_texts: returns the text of each id, and the places of special tokens. forget: stops and
    removes the named answers of an owner's session."""
    routes = APIRouter(prefix="/v1")
    _add_sessions(routes, engine, forget)
    _add_caches(routes, engine, token_texts)

    @routes.get("/methods")
    async def list_methods() -> Any:
        default = CacheRequest.parse(**engine.cache)
        standard = {"method": default.method.name, "budget": None if default.budget is None else str(default.budget)}
        data = [
            {"name": one.name, "exactness": str(one.exactness), "budgeted": one.budgeted, "summary": one.summary}
            for one in methods().values()
        ]
        return {"object": "list", "data": data, "default": standard}

    return routes


async def _in_engine(engine: Engine, call: Callable[[], T]) -> T:
    """Return the result of ``call``, run in the engine's thread. Raises APIError if the engine does not get to it."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(engine.call(call)), ENGINE_TIMEOUT_S)
    except TimeoutError:
        raise APIError(503, "The engine is busy; retry later.", "busy") from None


def _add_sessions(routes: APIRouter, engine: Engine, forget: Callable[[str, str], None]) -> None:
    pool, storage, listing = engine.sessions, engine.sessions.storage, asyncio.Lock()

    async def known(owner: str, name: str | None = None) -> dict[str, dict[str, Any]]:
        """Return the facts of an owner's sessions by name; with ``name``, at least those of that session."""
        found = await asyncio.to_thread(_saved, storage.store, owner, name)
        opened = await _in_engine(engine, lambda: pool.facts(owner, name))
        return await asyncio.to_thread(_merged, found, opened)

    @routes.get("/sessions")
    async def every(request: Request) -> Any:
        """List the sessions of a key, last used first."""
        async with listing:  # one list at a time, so that many do not take all worker threads
            return await json_response(_list, await known(request.state.owner))

    @routes.get("/sessions/{name}")
    async def one(request: Request, name: str) -> Any:
        found = (await known(request.state.owner, name)).get(name)
        if found is None:
            raise _unknown(name)
        return found

    @routes.delete("/sessions/{name}")
    async def remove(request: Request, name: str) -> Any:
        """Delete a session from memory and disk, and its named answers. While it is answering, the status is 409."""
        key = (request.state.owner, name)
        forget(*key)
        with suppress(UsageError):
            check_name(key)
            if name in await known(*key):
                await _in_engine(engine, lambda: pool.drop(key))
                await asyncio.to_thread(_remove, storage, key)
                return {"name": name, "object": "session", "deleted": True}
        raise _unknown(name)


def _add_caches(
    routes: APIRouter, engine: Engine, token_texts: Callable[[Sequence[int]], tuple[list[str], list[int]]]
) -> None:
    pool, looking = engine.sessions, asyncio.Lock()

    async def in_engine(call: Callable[[], T]) -> T:
        """One call at a time, so that a polling client delays answers by at most one call."""
        async with looking:
            return await _in_engine(engine, call)

    @routes.get("/memory")
    async def memory() -> Any:
        kinds = await in_engine(pool.bytes_by_kind)
        numbers = {"running": len(engine.running), "waiting": engine.waiting, "sessions": len(pool.memory)}
        used = sum(kinds.values()) - kinds["checkpoint_disk"]
        return {"total": engine.arbiter.total, "held": used, "kinds": kinds, **numbers}

    @routes.get("/sessions/{name}/cache")
    async def cache(
        request: Request, name: str, columns: Annotated[int, Query(ge=1, le=1024)] = 256, texts: bool = False
    ) -> Any:
        """Show the state of every token of a session, by layer and by token. Shares are bytes, in base64.
        With texts, ``special`` lists the positions of special tokens."""
        found = await in_engine(lambda: cache_view(engine, (request.state.owner, name)))
        if found is None:
            raise APIError(404, f"No session '{name}' is in memory.", "session_not_found", "name")

        def body() -> dict[str, Any]:
            made = {"session": name, **found.body(columns)}
            if texts and len(found.ids) <= MAX_TEXTS:
                made["texts"], made["special"] = token_texts(found.ids)
            return made

        return await json_response(body)


def _list(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    data = sorted(found.values(), key=lambda facts: (-facts["used"], facts["name"]))
    return {"object": "list", "data": data}


def _merged(saved: dict[str, dict[str, Any]], opened: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the facts of stored sessions and of those in memory, by name."""
    for name, facts in opened.items():
        if name in saved or "state" in facts:
            saved[name] = saved.get(name, {"name": name, "object": "session", "bytes": 0}) | facts
    return saved


def _remove(storage: SessionStorage, key: Name) -> None:
    """Remove a session from the store, if it is there. Raises SessionError."""
    store = storage.store
    if store is None:
        return
    try:
        storage.naming_session(key, lambda: store.remove("/".join(key)))
    except SessionError:
        if _saved(store, *key):  # else it is not stored, or was already deleted
            raise


def _unknown(name: str) -> APIError:
    return APIError(404, f"This key has no session '{name}'.", "session_not_found")


def _saved(store: Store | None, owner: str, name: str | None) -> dict[str, dict[str, Any]]:
    """Return the facts of all stored sessions of an owner, or of one, by name. Raises SessionUnwritable if the store
    cannot be used now."""
    if store is None:
        return {}
    try:
        found = store.sessions(owner) if name is None else [store.info(f"{owner}/{name}")]
    except SessionUnwritable:
        raise
    except (SessionError, UsageError, FileNotFoundError):
        if name is None:
            raise
        return {}  # it is missing or unreadable
    return {facts["name"]: facts for facts in map(_facts, found)}


def _facts(info: SessionInfo) -> dict[str, Any]:
    """Return the facts of a stored session, without its path."""
    return {
        "name": info.name.rpartition("/")[2],
        "object": "session",
        "state": "in use elsewhere" if info.in_use else "parked",
        "tokens": info.tokens,
        "saves": info.saves,
        "method": info.method,
        "budget": info.budget,
        "bytes": info.bytes,
        "memory_bytes": 0,
        "used": info.used,
        "note": info.problem and (NEVER_SAVED if info.problem == UNSAVED else UNREADABLE),
    }


# -- entries ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheView:
    """The entries of one session's cache, by token, layer and head."""

    facts: dict[str, Any]
    """Method, exactness, budget (entries per layer), place of the checkpoint; whether an answer is being generated, and
    the tokens of the prompt that is being read."""
    ids: list[int]
    """Ids of the tokens that the cache has read, without drafts."""
    layers: list[Tensor]
    """Codes of :class:`EntryState` for each layer, (kv_heads, tokens) int8."""

    def map(self, columns: int) -> Tensor:
        """Return the share of entries in each state, over all heads, by layer and column: (layers, columns, states).
        The columns divide the tokens equally."""
        column = torch.arange(len(self.ids)) * columns // len(self.ids)
        counts = torch.stack([_counted(layer, column, columns) for layer in self.layers])
        return counts / counts.sum(-1, keepdim=True)

    def kept(self) -> Tensor:
        """Return the number of entries of each token in each state, over all layers and heads: (tokens, states)."""
        slots = torch.arange(len(self.ids))
        each = torch.zeros(len(self.ids), len(EntryState), dtype=torch.long)
        for layer in self.layers:
            each += _counted(layer, slots, len(self.ids))
        return each

    def body(self, columns: int) -> dict[str, Any]:
        """Return the view as JSON, with at most ``columns`` columns of :meth:`map`. Shares are bytes, in base64."""
        kept, map = self.kept(), self.map(columns := min(columns, len(self.ids)))
        shares = kept / kept.sum(-1, keepdim=True)
        present = {state.name.lower(): state for state in EntryState if kept[:, state].any()}
        return {
            **self.facts,
            "tokens": len(self.ids),
            "entries": {name: int(kept[:, state].sum()) for name, state in present.items()},
            "layers": len(self.layers),
            "columns": columns,
            "map": {name: _packed(map[..., state]) for name, state in present.items()},
            "kept": {name: _packed(shares[:, state]) for name, state in present.items()},
        }


def _counted(layer: Tensor, column: Tensor, columns: int) -> Tensor:
    """Return the number of codes of ``layer`` (kv_heads, tokens) in each column: (columns, states)."""
    found = torch.bincount((column * len(EntryState) + layer).flatten(), minlength=columns * len(EntryState))
    return found.view(columns, len(EntryState))


def _packed(shares: Tensor) -> str:
    """Return shares from 0 to 1 as bytes from 0 to 255, in base64. Only a share of 0 gives the byte 0."""
    numbers = (shares * 255).round().clamp(min=1).where(shares > 0, 0)
    return base64.b64encode(numbers.byte().numpy().tobytes()).decode("ascii")


def cache_view(engine: Engine, name: Name) -> CacheView | None:
    """Return a view of the session ``name``; None if it is not in memory, or has read nothing."""
    session = engine.sessions.memory.get(name)
    if session is None or not session.cache.get_seq_length():
        return None
    cache = session.cache
    known = cache.get_seq_length() if cache.draft_passes is None else cache.draft_passes.kept
    job = next((job for job in engine.running if job.session is session), None)
    facts = {
        "method": cache.method.name,
        "exactness": str(cache.exactness),
        "budget": cache.entries,
        "where": None if cache.checkpoint is None else cache.checkpoint.home.name,
        "running": job is not None,
        "prompt": None if job is None or job.writes else len(job.ask.prompt),
        "bytes": bytes_by_kind(cache),
    }
    layers = [layer[0, :, :known].clone() for layer in cache.entry_states() if layer.shape[1]]  # it may reuse them
    return CacheView(facts, ([*session.past.ids] if job is None else job.known)[:known], layers)
