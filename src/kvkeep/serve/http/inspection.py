"""Routes that show methods, memory, and the state of each token of a session."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request
from torch import Tensor

from kvkeep.contracts.entries import EntryState
from kvkeep.policies.methods import methods
from kvkeep.policies.request import Request as CacheRequest
from kvkeep.serve.cache_view import CacheView, cache_view, memory_use
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.completions import Completions
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.json_text import json_response
from kvkeep.serve.http.openapi import error_responses

T = TypeVar("T")
ENGINE_TIMEOUT_S = 30.0
"""Seconds to wait for the end of the engine's step."""
MAX_TEXTS = 20_000
"""The maximum number of tokens of a cache that is returned with their texts."""


def inspection_routes(engine: Engine, completions: Completions) -> APIRouter:
    """Return the routes."""
    routes, lock = APIRouter(), asyncio.Lock()

    async def in_engine(call: Callable[[], T]) -> T:
        """Return the result of ``call``, run in the engine's thread. Only one call runs at a time, so a polling client
        delays answers by at most one call."""
        async with lock:
            try:
                return await asyncio.wait_for(asyncio.wrap_future(engine.call(call)), ENGINE_TIMEOUT_S)
            except TimeoutError:
                raise APIError(503, "The engine is busy; retry later.", "busy") from None

    @routes.get("/v1/methods")
    async def list_methods() -> Any:
        """List the methods that have a name, and the server's default."""
        default = CacheRequest.parse(**engine.cache)
        standard = {"method": default.method.name, "budget": None if default.budget is None else str(default.budget)}
        data = [
            {"name": one.name, "exactness": str(one.exactness), "budgeted": one.budgeted, "summary": one.summary}
            for one in methods().values()
        ]
        return {"object": "list", "data": data, "default": standard}

    @routes.get("/v1/memory", responses=error_responses(503))
    async def memory() -> Any:
        """Return the bytes that all sessions use, and their limit."""
        found = await in_engine(lambda: memory_use(engine))
        numbers = {"running": len(engine.running), "waiting": engine.waiting, "sessions": found.sessions}
        return {"total": engine.arbiter.total, "held": found.memory, "kinds": found.kinds, **numbers}

    @routes.get("/v1/sessions/{name}/cache", responses=error_responses(400, 404, 503))
    async def session_cache(
        request: Request, name: str, columns: Annotated[int, Query(ge=1, le=1024)] = 256, texts: bool = False
    ) -> Any:
        """Show the state of every token of a session, by layer and by token. Shares are bytes, in base64.
        With texts, ``special`` lists the positions of special tokens."""
        found = await in_engine(lambda: cache_view(engine, (request.state.owner, name)))
        if found is None:
            raise APIError(404, f"No session '{name}' is in memory.", "session_not_found", "name")

        def body() -> dict[str, Any]:
            made = {"session": name, **_body(found, columns)}
            if texts and len(found.ids) <= MAX_TEXTS:
                made["texts"], made["special"] = completions.token_texts(found.ids)
            return made

        return await json_response(body)

    return routes


def _body(found: CacheView, columns: int) -> dict[str, Any]:
    """Return a view of a cache as JSON data."""
    kept, map = found.kept(), found.map(columns := min(columns, len(found.ids)))
    shares = kept / kept.sum(-1, keepdim=True)
    present = {state.name.lower(): state for state in EntryState if kept[:, state].any()}
    return {
        "method": found.method,
        "exactness": found.exactness,
        "budget": found.budget,
        "where": found.where,
        "running": found.running,
        "prompt": found.prompt,
        "tokens": len(found.ids),
        "bytes": found.bytes,
        "entries": {name: int(kept[:, state].sum()) for name, state in present.items()},
        "layers": len(found.layers),
        "columns": columns,
        "map": {name: _packed(map[..., state]) for name, state in present.items()},
        "kept": {name: _packed(shares[:, state]) for name, state in present.items()},
    }


def _packed(shares: Tensor) -> str:
    """Return shares from 0 to 1 as bytes from 0 to 255, in base64. Only a share of 0 gives the byte 0."""
    numbers = (shares * 255).round().clamp(min=1).where(shares > 0, 0)
    return base64.b64encode(numbers.byte().numpy().tobytes()).decode("ascii")
