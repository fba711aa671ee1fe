"""The application: what happens to every request, its routes, and the page."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from importlib import import_module, resources
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvkeep.blocks.store import LOCAL_OWNER
from kvkeep.engine.sampling import fields
from kvkeep.errors import UsageError, place_of
from kvkeep.models.loading import Loaded
from kvkeep.native.room import has_room
from kvkeep.policies.names import Pin
from kvkeep.serve.engine import ROOM_BYTES, Engine
from kvkeep.serve.http.answer_events import Limits
from kvkeep.serve.http.answering import DEFAULT_MAX_TOKENS, STREAM_HEADERS, Answering, request_log
from kvkeep.serve.http.body import (
    MAX_REQUEST_BYTES,
    Hold,
    RequestMemory,
    check_headers,
    json_response,
    key_of,
    limit_body,
    read_body,
    unless_disconnected,
)
from kvkeep.serve.http.completions import ChatRequest, TextRequest, TokenizeRequest
from kvkeep.serve.http.errors import HANDLERS, APIError, new_request_id
from kvkeep.serve.http.keys import digest_of, owner_of
from kvkeep.serve.http.messages import CountRequest, MessagesRequest
from kvkeep.serve.http.metrics import CONTENT_TYPE, Metrics
from kvkeep.serve.http.responses import ResponseRequest
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
PUBLIC_PATHS = ("/health", "/ready", "/")
PAGE_PREFIX = "/page/"
"""The prefix of paths that need no key, in addition to :data:`PUBLIC_PATHS`: the files of the page."""

log = logging.getLogger(__name__)


def alive(engine: Engine) -> bool:
    """Return whether an engine has taken a step recently, or has nothing to do."""
    stalled = bool(engine.running) and time.monotonic() - engine.beat > STALLED_S
    return engine.fault is None and not stalled


def application(
    engine: Engine,
    loaded: Loaded,
    keys: Sequence[str],
    limits: Limits | None = None,
    origins: Sequence[str] = (),
    scrape: Callable[[], Awaitable[bytes]] | None = None,
    as_sent: bool = False,
    pin: Pin | None = None,
) -> FastAPI:
    """Return the application of a running engine. keys: those of its clients, whose sessions belong to them; none: all
    clients are one. origins: origins whose pages may use it (CORS). scrape: returns the text of ``/metrics``, if it
    covers more than this engine. as_sent: whether lines of system prompts that change with each session stay.
    pin: the first tokens of each prompt that are pinned."""
    memory = RequestMemory(MAX_REQUEST_BYTES)
    metrics = Metrics(engine, memory)
    answering = Answering(engine, loaded, limits or Limits(), metrics, as_sent, pin)
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
    app.include_router(session_routes(engine, answering.token_texts, answering.kept.forget))
    _add_operations(app, engine, scrape or metrics.scraped)
    return app


# -- every request ------------------------------------------------------------------------------------------


class RequestMiddleware:
    """What happens to every request before its route: its key is checked, and its body is limited
    (:mod:`~kvkeep.serve.http.body`). Routes read the owner of a request from ``request.state.owner``, and its memory
    from ``request.state.hold``. Unexpected errors are logged by type and place, never by message, which may quote a
    prompt.

    A server without keys answers only requests whose Host is this machine. This prevents DNS rebinding, in which
    another site's page uses the server under the site's name.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], metrics: Metrics, memory: RequestMemory) -> None:
        self.app, self.metrics, self.memory = app, metrics, memory
        self._digests = [digest_of(key) for key in dict.fromkeys(keys)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, request_id = time.monotonic(), 0, new_request_id()
        head = scope["method"] == "HEAD"  # answered as a GET, without a body
        hold = Hold(self.memory)
        state = {**scope.get("state", {}), "hold": hold, "request_id": request_id}
        scope = {**scope, "method": "GET" if head else scope["method"], "state": state}

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).append("x-request-id", request_id)
            await send({**message, "body": b""} if head and "body" in message else message)

        try:
            self._authorize(scope)
            check_headers(scope)
            if scope["path"] not in PUBLIC_PATHS and not has_room(ROOM_BYTES):
                raise MemoryError
            await self.app(scope, limit_body(receive, hold), send_with_id)
        except Exception as error:
            if not isinstance(error, APIError):
                log.error("%s failed: %s", request_id, place_of(error))
            found = self.metrics.rejected(error)
            if status:  # the response has begun, so it can only be interrupted
                raise _ResponseInterrupted from None
            await found.response(scope["path"])(scope, receive, send_with_id)
        finally:
            hold.release()
            path, seconds = quote(scope["path"]), time.monotonic() - started  # quoted: always one line
            request_log.info("%s %s %s %d %.2f s", request_id, scope["method"], path, status, seconds)

    def _authorize(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if not self._digests and not _is_loopback(headers.get("host", "")):
            sentence = (
                "A server without keys only answers requests to 'localhost'; start it with a key for other names."
            )
            raise APIError(403, sentence, "wrong_host")
        if scope["path"] not in PUBLIC_PATHS and not scope["path"].startswith(PAGE_PREFIX):
            scope["state"]["owner"] = self._owner(key_of(headers))

    def _owner(self, key: str | None) -> str:
        """Return the owner of a request with this ``key``; of a server without keys, all clients are one. Raises
        APIError for a wrong or missing key."""
        if not self._digests:
            return LOCAL_OWNER
        given, owner = digest_of(key or ""), ""
        for digest in self._digests:  # compare with all of them, so that timing reveals nothing
            if hmac.compare_digest(digest, given):
                owner = owner_of(digest)
        if key is None or not owner:
            raise APIError(401, "The API key is wrong or missing; send 'Authorization: Bearer KEY'.", "invalid_api_key")
        return owner


def log_requests() -> None:
    """Write :data:`request_log` to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    request_log.addHandler(handler)
    request_log.setLevel(logging.INFO)
    request_log.propagate = False


class _ResponseInterrupted(Exception):
    """A response was interrupted after its beginning was sent."""


def _is_loopback(host: str) -> bool:
    """Return whether a Host header names this machine."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name.lower() == "localhost"


# -- routes -------------------------------------------------------------------------------------------------


def _add_page(app: FastAPI) -> None:
    """Add the page at ``/``: files of this package, which load nothing from other hosts."""
    folder = resources.files("kvkeep.serve").joinpath("page")
    files = {one.name: one.read_bytes() for one in folder.iterdir() if one.name.rpartition(".")[2] in PAGE_TYPES}
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, content in files.items()}

    @app.get("/page/{name}")
    async def file(request: Request, name: str) -> Response:
        if name not in files:
            raise APIError(404, f"The page has no file '{name}'.")
        headers = {**PAGE_HEADERS, "ETag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(files[name], media_type=PAGE_TYPES[name.rpartition(".")[2]], headers=headers)

    @app.get("/")
    async def index(request: Request) -> Response:
        return await file(request, "index.html")


def _add_answers(app: FastAPI, answering: Answering) -> None:
    records = answering.records

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        return await answering.respond(request, await read_body(request, ChatRequest))

    @app.post("/v1/responses")
    async def respond(request: Request) -> Any:
        """Answer a conversation as OpenAI's newer clients send it."""
        body = await read_body(request, ResponseRequest)
        return await answering.respond(request, body.using(records.of(request.state.owner)))

    @app.get("/v1/responses/{response_id}")
    async def response_of(request: Request, response_id: str) -> Any:
        return (await recorded(request, response_id))["response"]

    @app.delete("/v1/responses/{response_id}")
    async def remove_response(request: Request, response_id: str) -> Any:
        await recorded(request, response_id)
        await asyncio.to_thread(records.of(request.state.owner).remove, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def recorded(request: Request, response_id: str) -> dict[str, Any]:
        found = await asyncio.to_thread(records.of(request.state.owner).get, response_id)
        if found is None or "response" not in found:
            raise APIError(404, f"There is no response '{response_id[:100]}'.", "not_found")
        return found

    @app.post("/v1/messages")
    async def message(request: Request) -> Any:
        """Answer a conversation as Anthropic's clients send it."""
        return await answering.respond(request, await read_body(request, MessagesRequest))

    @app.post("/v1/messages/count_tokens")
    async def count(request: Request) -> Any:
        """Return the number of tokens of a conversation up to its answer."""
        body = await read_body(request, CountRequest)
        answering.check_model(body.model)
        given = answering.encode(body.given, request.state.hold.bytes, request.state.owner)
        return {"input_tokens": len((await unless_disconnected(request, given)).ids)}

    @app.post("/v1/completions")
    async def complete(request: Request) -> Any:
        return await answering.respond(request, await read_body(request, TextRequest))

    @app.get("/v1/sessions/{name}/answers/{answer}")
    async def follow(request: Request, name: str, answer: str) -> Any:
        """Send the stream of a named answer from its beginning."""
        found = answering.kept.get((request.state.owner, name, answer))
        return StreamingResponse(found.follow(), media_type="text/event-stream", headers=STREAM_HEADERS)

    @app.post("/v1/sessions/{name}/answers/{answer}/cancel")
    async def stop(request: Request, name: str, answer: str) -> Any:
        """Stop a named answer; its stream ends with what is written."""
        answering.kept.get((request.state.owner, name, answer)).stop()
        return {"name": answer, "object": "answer", "cancelled": True}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Any:
        """Return the token ids of a text, or of a conversation up to its answer."""
        body = await read_body(request, TokenizeRequest)
        answering.check_model(body.model)
        if not (body.prompt or body.messages):
            raise UsageError("There is nothing to tokenize; send 'prompt' or 'messages'.")
        given = answering.encode(body.given, request.state.hold.bytes, request.state.owner)
        ids = (await unless_disconnected(request, given)).ids
        request.state.hold.tokens(len(ids))
        positions = answering.engine.geometry.max_positions
        return await json_response(lambda: {"tokens": ids, "count": len(ids), "max_model_len": positions})


def _add_models(app: FastAPI, answering: Answering) -> None:
    model = {
        "id": answering.model, "object": "model", "created": int(time.time()), "owned_by": "kvkeep",
        "kvkeep": {"sampling": fields(answering.sampling), "max_tokens": DEFAULT_MAX_TOKENS},
    }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def model_of(name: str) -> Any:
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
        if engine.stopping:
            raise APIError(503, "The server is shutting down.", "stopping")
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Any:
        return Response(await scrape(), media_type=CONTENT_TYPE)
