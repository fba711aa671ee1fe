"""What stands before several replicas, in the proxies of Ray Serve: it says which session a request is of, and what
became of an answer whose replica has ended.

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
from kvkeep.serve.http.refused import Refused

HEADER = "x-session-id"
"""Where Ray Serve's router looks for the session."""
BEGINNING = 512
"""Characters or tokens of a text by which requests without a session are told apart."""


def front() -> list[Middleware]:
    """Return what Serve's proxies put before every request; :data:`FRONT` names it."""
    return [Middleware(Front)]


class Front:
    """Tells Serve's router which session a request is of, and clients what Serve does not: an answer that its replica
    did not begin is a 503 with ``Retry-After``, and a stream that it did not end ends with an error."""

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
            await error.response()(scope, receive, send)
            return
        headers = MutableHeaders(scope={**scope})
        key = _key(scope["path"], headers, body)
        kept = [(name, value) for name, value in scope["headers"] if name.replace(b"_", b"-") != HEADER.encode()]
        await self.app({**scope, "headers": [*kept, (HEADER.encode(), key.encode())]}, receive, answer.send)
        await answer.close(scope, receive)


def _key(path: str, headers: Headers, body: bytes) -> str:
    """Return by what a request is told to a replica: its key of access and its session; where it names none, the text
    that it begins with. Requests of one conversation have one, whichever way it is named; it tells nothing of them."""
    try:
        asked = json.loads(body) if body else None
    except (ValueError, RecursionError):  # the replica says what is wrong
        asked = None
    named = _named(path, asked) or headers.get(HEADER)
    told = ["session", named] if named else ["beginning", _beginning(asked)]
    known = json.dumps([headers.get("authorization"), *told])
    return blake2b(known.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _named(path: str, asked: Any) -> str | None:
    """Return the session that a request names, in its path or its body."""
    if path.startswith("/v1/sessions/"):
        return path.split("/")[3] or None
    own = asked.get("kvkeep") if isinstance(asked, dict) else None
    named = own.get("session") if isinstance(own, dict) else None
    return named if isinstance(named, str) else None


def _beginning(asked: Any) -> Any:
    """Return what a conversation's requests all begin with: messages up to the user's first, or a text's beginning."""
    if not isinstance(asked, dict):
        return None
    messages, prompt = asked.get("messages"), asked.get("prompt")
    if isinstance(messages, list):
        users = [at for at, one in enumerate(messages) if isinstance(one, dict) and one.get("role") == "user"]
        return messages[: users[0] + 1] if users else messages[:1]
    return prompt[:BEGINNING] if isinstance(prompt, str | list) else None


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


class _Answer:
    """What a client is told of one request."""

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
        """Tell of an answer that was not begun, or not ended."""
        gone = Refused(
            503, "The replica that answered has ended; ask again, another one goes on.", "replica_lost",
            headers={"Retry-After": "1"},
        )  # fmt: skip
        if not self._begun:
            await gone.response()(scope, receive, self._send)
        elif self._streams and not self._whole:
            text = f"data: {json.dumps(gone.body())}\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": text.encode(), "more_body": False})
