"""ASGI middleware of Ray Serve's proxies: sets the routing key, and completes answers of replicas that ended.

A proxy is a process without a model, so nothing here imports torch.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvkeep.serve.http.body import limited
from kvkeep.serve.http.keys import bearer
from kvkeep.serve.http.refused import Refused, new_id

HEADER = "x-session-id"
"""Where Ray Serve's router looks for the routing key."""


def front() -> list[Middleware]:
    """Return what Serve's proxies put before every request; :data:`ENVIRONMENT` names it."""
    return [Middleware(Front)]


class Front:
    """Sets the header by which Serve's router chooses a replica. An answer that its replica did not begin becomes a 503
    with ``Retry-After``, and a stream that it did not end ends with an error."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            body, receive = await _read(scope, limited(receive))
        except Refused as error:
            await _told(error)(scope, receive, send)
            return
        headers = MutableHeaders(scope={**scope})
        key = routing_key(scope["path"], headers, body)
        kept = [(name, value) for name, value in scope["headers"] if name.replace(b"_", b"-") != HEADER.encode()]
        own = [] if key is None else [(HEADER.encode(), key.encode())]
        try:
            await self.app({**scope, "headers": [*kept, *own]}, receive, answer.send)
        finally:
            await answer.close(scope, receive)


def routing_key(path: str, headers: Headers, body: bytes) -> str | None:
    """Return the routing key of a request: a digest of access key and session, else of the messages that all requests
    of its conversation begin with. None where there are neither: Serve's router then spreads requests evenly."""
    try:
        asked = json.loads(body) if body else None
    except (ValueError, RecursionError):  # the replica says what is wrong
        asked = None
    what: list[Any]
    if named := _named(path, asked) or headers.get(HEADER):
        what = ["session", named]
    elif opening := _opening(asked):
        what = ["opening", opening]
    else:
        return None
    whole = json.dumps([bearer(headers.get("authorization")), *what])
    return blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _named(path: str, asked: Any) -> str | None:
    """Return the session that a request names, in its path or its body."""
    if path.startswith("/v1/sessions/"):
        return path.split("/")[3] or None
    own = asked.get("kvkeep") if isinstance(asked, dict) else None
    named = own.get("session") if isinstance(own, dict) else None
    return named if isinstance(named, str) else None


def _opening(asked: Any) -> list[Any] | None:
    """Return the messages up to the user's first one, with which all requests of a conversation begin; None without."""
    messages = asked.get("messages") if isinstance(asked, dict) else None
    if not isinstance(messages, list):
        return None
    users = (at for at, one in enumerate(messages) if isinstance(one, dict) and one.get("role") == "user")
    first = next(users, None)
    return None if first is None else messages[: first + 1]


async def _read(scope: Scope, receive: Receive) -> tuple[bytes, Receive]:
    """Return the body of a request, and a ``receive`` that gives it once more. Raises Refused."""
    parts, more = list[bytes](), scope["method"] == "POST"
    while more:
        message = await receive()
        if message["type"] != "http.request":  # the client has left
            return b"", _again(message, receive)
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"".join(parts)
    return body, _again({"type": "http.request", "body": body, "more_body": False}, receive)


def _again(message: Message, receive: Receive) -> Receive:
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return message

    return again


def _told(error: Refused) -> ASGIApp:
    """Return an error of the front itself as an answer."""
    answer = error.response()
    answer.headers["x-request-id"] = new_id()
    return answer


class _Answer:
    """The answer to one request as it goes to the client. lost: Serve sent an error of its own instead; begun, whole:
    the replica's answer; streams: it is a stream of events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lost = self._begun = self._whole = self._streams = False

    async def send(self, message: Message) -> None:
        """Pass a message on, but for an error that is Serve's own."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            kind = headers.get("content-type", "")
            self._lost = message["status"] >= 500 and not kind.startswith("application/json")
            self._streams = kind.startswith("text/event-stream")
            names = headers.getlist("x-request-id")
            headers["x-request-id"] = names[0]  # the one that is in the replica's log; Serve appends its own
            self._begun = not self._lost
        if not self._lost:
            self._whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await self._send(message)

    async def close(self, scope: Scope, receive: Receive) -> None:
        """Send the error for an answer that was not begun, or the end of a stream that has none."""
        gone = Refused(
            503, "The replica that answered has ended; ask again, another one goes on.", "replica_lost",
            headers={"Retry-After": "1"},
        )  # fmt: skip
        if not self._begun:
            await _told(gone)(scope, receive, self._send)
        elif self._streams and not self._whole:
            text = f"data: {json.dumps(gone.body())}\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": text.encode(), "more_body": False})
