"""Routes that show what a person may want to know: the methods, the memory, and what one's own cache remembers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request
from torch import Tensor

from kvkeep.contracts.entries import EntryState
from kvkeep.policies.methods import methods
from kvkeep.policies.request import Request as CacheRequest
from kvkeep.serve.http.errors import Refused
from kvkeep.serve.http.openapi import errors
from kvkeep.serve.look import Picture, memory, picture

if TYPE_CHECKING:
    from kvkeep.serve.http.app import Server

Found = TypeVar("Found")
PATIENCE_S = 30.0
"""Seconds that one waits for the engine to be between two steps."""
MOST_TEXTS = 20_000
"""Tokens up to which a picture has their texts."""


def looking(server: Server) -> APIRouter:
    """Return the routes."""
    routes, turn, engine = APIRouter(), asyncio.Lock(), server.engine

    async def asked(call: Callable[[], Found]) -> Found:
        """Ask the engine, one question at a time: whoever looks often makes nobody wait for more than one."""
        async with turn:
            try:
                return await asyncio.wait_for(asyncio.wrap_future(engine.call(call)), PATIENCE_S)
            except TimeoutError:
                raise Refused(503, "The engine is busy; ask again later.", "busy") from None

    @routes.get("/v1/methods")
    async def known() -> Any:
        """List the methods with a name, and what sessions are that name none."""
        default = CacheRequest.parse(**engine.cache)
        own = {"method": default.method.name, "budget": None if default.budget is None else str(default.budget)}
        every = [
            {"name": one.name, "exactness": str(one.exactness), "budgeted": one.budgeted, "summary": one.summary}
            for one in methods().values()
        ]
        return {"object": "list", "data": every, "default": own}

    @routes.get("/v1/memory", responses=errors(503))
    async def held() -> Any:
        """Tell how much memory all sessions hold, of how much."""
        found = await asked(lambda: memory(engine))
        numbers = {"running": len(engine.running), "waiting": engine.waiting, "sessions": found.sessions}
        return {"total": engine.arbiter.total, "held": found.memory, "kinds": found.kinds, **numbers}

    @routes.get("/v1/sessions/{name}/cache", responses=errors(400, 404, 503))
    async def remembered(
        request: Request, name: str, columns: Annotated[int, Query(ge=1, le=1024)] = 256, texts: bool = False
    ) -> Any:
        """Show what became of every token of one's own session, by layer and by token. Shares are bytes, base64."""
        found = await asked(lambda: picture(engine, (request.state.owner, name)))
        if found is None:
            raise Refused(404, f"There is no session '{name}' in memory.", "session_not_found", "name")
        body = {"session": name, **await asyncio.to_thread(_drawn, found, columns)}
        if texts and len(found.ids) <= MOST_TEXTS:
            body["texts"] = await asyncio.to_thread(server.texts, found.ids)
        return body

    return routes


def _drawn(found: Picture, columns: int) -> dict[str, Any]:
    """Return a picture as plain types."""
    kept, map = found.kept(), found.map(columns := min(columns, len(found.ids)))
    shares = kept / kept.sum(-1, keepdim=True)
    there = {state.name.lower(): state for state in EntryState if kept[:, state].any()}
    return {
        "method": found.method,
        "exactness": found.exactness,
        "budget": found.budget,
        "where": found.where,
        "running": found.running,
        "tokens": len(found.ids),
        "bytes": found.bytes,
        "entries": {name: int(kept[:, state].sum()) for name, state in there.items()},
        "layers": len(found.layers),
        "columns": columns,
        "map": {name: _packed(map[..., state]) for name, state in there.items()},
        "kept": {name: _packed(shares[:, state]) for name, state in there.items()},
    }


def _packed(shares: Tensor) -> str:
    """Return shares from 0 to 1 as bytes from 0 to 255, in base64; a share that is not 0 is none that is."""
    numbers = (shares * 255).round().clamp(min=1).where(shares > 0, 0)
    return base64.b64encode(numbers.byte().numpy().tobytes()).decode("ascii")
