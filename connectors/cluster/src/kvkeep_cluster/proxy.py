"""ASGI middleware for Ray Serve's proxies. It sets the routing key, and completes responses of ended replicas.

A proxy is a process without a model, so this module does not import torch.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvkeep.serve.http.body import (
    MAX_REQUEST_BYTES,
    Hold,
    RequestMemory,
    check_headers,
    in_worker,
    key_of,
    limit_body,
    read_json,
)
from kvkeep.serve.http.errors import APIError, new_request_id

HEADER = "x-session-id"
"""The header in which Ray Serve's router expects the routing key."""


def middleware() -> list[Middleware]:
    """Return the middleware of Serve's proxies, which find this function by
    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(ProxyMiddleware)]


class ProxyMiddleware:
    """Sets the header by which Serve's router chooses a replica. If the replica did not begin its response, the client
    gets a 503 with ``Retry-After``. If the replica did not finish a stream, the stream ends with an error."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self._memory = app, RequestMemory(MAX_REQUEST_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        hold = Hold(self._memory)
        try:
            await self._forward(scope, receive, send, hold)
        finally:
            hold.release()

    async def _forward(self, scope: Scope, receive: Receive, send: Send, hold: Hold) -> None:
        response = _Response(send)
        try:
            check_headers(scope)
            body, receive = await _read(scope, limit_body(receive, hold))
            headers = MutableHeaders(scope={**scope})
            key = await in_worker(len(body), routing_key, scope["path"], headers, body)
        except APIError as error:
            await _error_response(error)(scope, receive, send)
            return
        kept = [(name, value) for name, value in scope["headers"] if name.replace(b"_", b"-") != HEADER.encode()]
        added = [] if key is None else [(HEADER.encode(), key.encode())]
        try:
            await self.app({**scope, "headers": [*kept, *added]}, receive, response.send)
        finally:
            await response.close(scope, receive)


def routing_key(path: str, headers: Headers, body: bytes) -> str | None:
    """Return the routing key of a request: a digest of access key and session. Without a session, the first messages
    replace it, which all requests of a conversation share. None without both; Serve's router then spreads requests
    evenly."""
    try:
        request = read_json(body) if body else None
    except APIError:  # the replica reports the error
        request = None
    parts: list[Any]
    if session := _session(path, request) or headers.get(HEADER):
        parts = ["session", session]
    elif opening := _opening(request):
        parts = ["opening", opening]
    else:
        return None
    text = json.dumps([key_of(headers), *parts])
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _session(path: str, request: Any) -> str | None:
    """Return the session named in a request's path or body."""
    if path.startswith("/v1/sessions/"):
        return path.split("/")[3] or None
    options = request.get("kvkeep") if isinstance(request, dict) else None
    session = options.get("session") if isinstance(options, dict) else None
    return session if isinstance(session, str) else None


def _opening(request: Any) -> list[Any] | None:
    """Return the messages up to the user's first one, which all requests of a conversation share; None without one."""
    messages = request.get("messages") if isinstance(request, dict) else None
    if not isinstance(messages, list):
        return None
    users = (at for at, one in enumerate(messages) if isinstance(one, dict) and one.get("role") == "user")
    first = next(users, None)
    return None if first is None else messages[: first + 1]


async def _read(scope: Scope, receive: Receive) -> tuple[bytes, Receive]:
    """Return the body of a request, and a ``receive`` that returns it again. Raises APIError."""
    parts, more = list[bytes](), scope["method"] == "POST"
    while more:
        message = await receive()
        if message["type"] != "http.request":  # the client has disconnected
            return b"", _replay(message, receive)
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"".join(parts)
    return body, _replay({"type": "http.request", "body": body, "more_body": False}, receive)


def _replay(message: Message, receive: Receive) -> Receive:
    replayed = False

    async def receive_again() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return message

    return receive_again


def _error_response(error: APIError) -> ASGIApp:
    """Return an error of the proxy as a response."""
    response = error.response()
    response.headers["x-request-id"] = new_request_id()
    return response


class _Response:
    """The response to one request on its way to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lost = False  # whether Serve sent its error instead
        self._begun = self._complete = False  # whether the replica's response has begun, and ended
        self._streams = False  # whether the response is an event stream

    async def send(self, message: Message) -> None:
        """Pass a message on, unless it is Serve's error."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            kind = headers.get("content-type", "")
            self._lost = message["status"] >= 500 and not kind.startswith("application/json")
            self._streams = kind.startswith("text/event-stream")
            names = headers.getlist("x-request-id")
            headers["x-request-id"] = names[0]  # the id in the replica's log; Serve appends another
            self._begun = not self._lost
        if not self._lost:
            self._complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await self._send(message)

    async def close(self, scope: Scope, receive: Receive) -> None:
        """Send an error if the response has not begun; end a stream that has no end."""
        lost = APIError(
            503,
            "The replica that handled the request has ended; retry, and another replica continues.",
            "replica_lost",
            headers={"Retry-After": "1"},
        )
        if not self._begun:
            await _error_response(lost)(scope, receive, self._send)
        elif self._streams and not self._complete:
            text = f"data: {json.dumps(lost.body())}\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": text.encode(), "more_body": False})
