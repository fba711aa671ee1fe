"""Routes of sessions: list them, describe one, delete one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from kvkeep.blocks.store import UNSAVED, SessionInfo, Store
from kvkeep.errors import SessionError, SessionUnwritable, UsageError
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.json_text import json_response
from kvkeep.serve.http.openapi import error_responses
from kvkeep.serve.session import check_name


def session_routes(engine: Engine) -> APIRouter:
    """Return the routes of an engine's sessions."""
    routes, pool, storage = APIRouter(prefix="/v1/sessions"), engine.sessions, engine.sessions.storage
    listing = asyncio.Lock()  # one list at a time, so that many do not take all worker threads

    async def known(owner: str, name: str | None = None) -> dict[str, dict[str, Any]]:
        """Return the facts of an owner's sessions by name; with ``name``, at least those of that session."""
        saved = await asyncio.to_thread(_saved, storage.store, owner, name)
        opened = await asyncio.wrap_future(engine.call(lambda: pool.facts(owner, name)))
        return await asyncio.to_thread(_merged, saved, opened)

    @routes.get("", responses=error_responses(503))
    async def every(request: Request) -> Any:
        """List the sessions of a key, last used first."""
        async with listing:
            return await json_response(_list, await known(request.state.owner))

    @routes.get("/{name}", responses=error_responses(404, 503))
    async def one(request: Request, name: str) -> Any:
        """Describe a session."""
        found = (await known(request.state.owner, name)).get(name)
        if found is None:
            raise _unknown(name)
        return found

    @routes.delete("/{name}", responses=error_responses(404, 409, 503))
    async def remove(request: Request, name: str) -> Any:
        """Delete a session from memory and disk. The status is 409 while it generates an answer."""
        key = (request.state.owner, name)
        try:
            check_name(key)
        except UsageError:
            raise _unknown(name) from None
        if name not in await known(*key):
            raise _unknown(name)
        await asyncio.wrap_future(engine.call(lambda: pool.drop(key)))
        if storage.store is not None:
            try:
                await asyncio.to_thread(storage.naming_session, key, partial(storage.store.remove, "/".join(key)))
            except SessionError:
                if await asyncio.to_thread(
                    _saved, storage.store, *key
                ):  # else it is not stored, or was already deleted
                    raise
        return {"name": name, "object": "session", "deleted": True}

    return routes


def _list(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    data = sorted(found.values(), key=lambda facts: (-facts["used"], facts["name"]))
    return {"object": "list", "data": data}


def _merged(saved: list[SessionInfo], opened: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the facts of stored sessions and of those in memory, by name."""
    found = {_name(info): _facts(info) for info in saved}
    for name, facts in opened.items():
        if name in found or "state" in facts:
            found[name] = found.get(name, {"name": name, "object": "session", "bytes": 0}) | facts
    return found


def _unknown(name: str) -> APIError:
    return APIError(404, f"This key has no session '{name}'.", "session_not_found")


def _name(info: SessionInfo) -> str:
    return info.name.rpartition("/")[2]


def _saved(store: Store | None, owner: str, name: str | None) -> list[SessionInfo]:
    """Return the facts about all stored sessions of an owner, or about one. Raises SessionUnwritable if the store
    cannot be used now."""
    if store is None:
        return []
    if name is None:
        return store.sessions(owner)
    try:
        return [store.info(f"{owner}/{name}")]
    except SessionUnwritable:
        raise
    except (SessionError, UsageError, FileNotFoundError):  # it is missing or unreadable
        return []


NEVER_SAVED, UNREADABLE = "Its first turn was never saved.", "The session cannot be read."


def _facts(info: SessionInfo) -> dict[str, Any]:
    """Return the facts of a stored session, without its path."""
    return {
        "name": _name(info),
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
