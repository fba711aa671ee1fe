"""The application: its routes, and the page."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from importlib import import_module, resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

from kvkeep.errors import UsageError
from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.answering import Answering
from kvkeep.serve.http.body import MAX_REQUEST_BYTES, RequestMemory, read_body, unless_disconnected
from kvkeep.serve.http.completions import ChatRequest, TextRequest, TokenizeRequest
from kvkeep.serve.http.errors import HANDLERS, APIError
from kvkeep.serve.http.events import Limits, json_response
from kvkeep.serve.http.keys import Keys
from kvkeep.serve.http.metrics import CONTENT_TYPE, Metrics
from kvkeep.serve.http.middleware import RequestMiddleware
from kvkeep.serve.http.sessions import session_routes

with suppress(ImportError):  # starlette imports it with the first stream, which then waits; anyio may rename it
    import_module("anyio._backends._asyncio")

STALLED_S = 120.0
"""Seconds without a step, while there is work, until the engine counts as dead."""
PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Headers of its files. By the first one, a browser lets the page load them and call its server, nothing else."""


def alive(engine: Engine) -> bool:
    """Return whether an engine has taken a step recently, or has nothing to do."""
    stalled = bool(engine.running) and time.monotonic() - engine.beat > STALLED_S
    return engine.fault is None and not stalled


def application(
    engine: Engine,
    loaded: Loaded,
    keys: Keys,
    limits: Limits | None = None,
    origins: Sequence[str] = (),
    scrape: Callable[[], Awaitable[bytes]] | None = None,
) -> FastAPI:
    """Return the application of a running engine. origins: origins whose pages may use it (CORS). scrape: returns the
    text of ``/metrics``, if it covers more than this engine."""
    memory = RequestMemory(MAX_REQUEST_BYTES)
    metrics = Metrics(engine, memory)
    answering = Answering(engine, loaded, limits or Limits(), metrics)
    app = FastAPI(exception_handlers=HANDLERS, redirect_slashes=False, openapi_url=None)
    app.state.metrics = metrics
    app.add_middleware(RequestMiddleware, keys=keys, metrics=metrics, memory=memory)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[*origins],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # the key is a header, never a cookie; OpenAI's clients send x-stainless-*
            expose_headers=["x-request-id", "retry-after"],
        )
    _add_page(app)
    _add_answers(app, answering)
    _add_models(app, answering)
    app.include_router(session_routes(engine, answering.token_texts))
    _add_operations(app, engine, scrape or metrics.scraped)
    return app


def _add_page(app: FastAPI) -> None:
    """Add the page at ``/``: files of this package, which load nothing from other hosts."""
    folder = resources.files("kvkeep.serve").joinpath("page")
    files = {one.name: one.read_bytes() for one in folder.iterdir() if one.name.rpartition(".")[2] in PAGE_TYPES}
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, content in files.items()}

    @app.get("/page/{name}")
    async def file(request: Request, name: str) -> Response:
        """Return a file of the page."""
        if name not in files:
            raise APIError(404, f"The page has no file '{name}'.")
        headers = {**PAGE_HEADERS, "ETag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(files[name], media_type=PAGE_TYPES[name.rpartition(".")[2]], headers=headers)

    @app.get("/")
    async def index(request: Request) -> Response:
        """Return the chat page."""
        return await file(request, "index.html")


def _add_answers(app: FastAPI, answering: Answering) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        """Answer a conversation."""
        return await answering.respond(request, await read_body(request, ChatRequest))

    @app.post("/v1/completions")
    async def complete(request: Request) -> Any:
        """Continue a text."""
        return await answering.respond(request, await read_body(request, TextRequest))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Any:
        """Return the token ids of a text, or of a conversation up to its answer."""
        body = await read_body(request, TokenizeRequest)
        answering.check_model(body.model)
        if not (body.prompt or body.messages):
            raise UsageError("There is nothing to tokenize; send 'prompt' or 'messages'.")
        ids = await unless_disconnected(request, answering.encode(body.given, request.state.hold.bytes))
        request.state.hold.tokens(len(ids))
        positions = answering.engine.geometry.max_positions
        return await json_response(lambda: {"tokens": ids, "count": len(ids), "max_model_len": positions})


def _add_models(app: FastAPI, answering: Answering) -> None:
    model = {"id": answering.model, "object": "model", "created": int(time.time()), "owned_by": "kvkeep"}

    @app.get("/v1/models")
    async def models() -> Any:
        """List the one model."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def model_of(name: str) -> Any:
        """Describe the model."""
        answering.check_model(name)
        return model


def _add_operations(app: FastAPI, engine: Engine, scrape: Callable[[], Awaitable[bytes]]) -> None:
    @app.get("/health")
    async def health() -> Any:
        """Check that the engine is alive: it has taken a step recently, or has no work."""
        if not alive(engine):
            raise APIError(503, "The engine does not respond.", "dead")
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Any:
        """Check whether the server accepts requests."""
        if engine.stopping:
            raise APIError(503, "The server is shutting down.", "stopping")
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Any:
        """Return metrics for Prometheus."""
        return Response(await scrape(), media_type=CONTENT_TYPE)
