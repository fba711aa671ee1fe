"""The body of a request: its maximum size, the time limit for its arrival, and the memory that it takes."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from kvkeep.serve.http.errors import CLOSE, APIError
from kvkeep.serve.http.request_memory import ALWAYS_BYTES, Hold

MAX_BODY_BYTES = 8_000_000
BODY_TIMEOUT_S = 60.0
"""Seconds for a body to arrive."""


def check_headers(scope: Scope) -> None:
    """Raise APIError for a request whose headers give its body two lengths or too great a length."""
    headers = Headers(scope=scope)
    length = headers.get("content-length", "")
    if length and "transfer-encoding" in headers:  # RFC 9112, 6.3: a smuggled request may follow
        raise APIError(
            400, "The request has both Content-Length and Transfer-Encoding; send one.", "invalid_value", headers=CLOSE
        )
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise _too_large()


def limit_body(receive: Receive, hold: Hold) -> Receive:
    """Return ``receive`` for one body, whose bytes ``hold`` counts as they arrive. It raises APIError if the body is
    too large or too slow, or if all requests together take too much."""
    deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
    read, complete = 0, False

    async def limited() -> Message:
        nonlocal read, complete
        if complete:  # the next message is the client's disconnect
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            sentence = f"The request body did not arrive within {BODY_TIMEOUT_S:.0f} s."
            raise APIError(408, sentence, "too_slow", headers=CLOSE) from None
        read += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if read > MAX_BODY_BYTES:
            raise _too_large()
        if message.get("body"):
            hold.resize(read)
        if read > ALWAYS_BYTES and not complete:
            await hold.turn()
        return message

    return limited


def _too_large() -> APIError:
    return APIError(413, f"The request body is larger than {MAX_BODY_BYTES // 10**6} MB.", "too_large")
