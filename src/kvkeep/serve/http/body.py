"""The body of a request: how large it may be, and how long it may take."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from kvkeep.serve.http.refused import Refused

LARGEST_BODY = 8_000_000
"""Bytes of a request."""
BODY_S = 60.0
"""Seconds that a body may take to arrive."""


def limited(receive: Receive) -> Receive:
    """Return ``receive`` for one body; it raises Refused where that is too large or too slow."""
    deadline = asyncio.get_running_loop().time() + BODY_S
    read, whole = 0, False

    async def within() -> Message:
        nonlocal read, whole
        if whole:  # what comes now is that the client leaves
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise Refused(408, f"The body did not arrive within {BODY_S:.0f} s.", "too_slow") from None
        read += len(message.get("body", b""))
        whole = not message.get("more_body", False)
        if read > LARGEST_BODY:
            raise too_large()
        return message

    return within


def too_large() -> Refused:
    """Return the error for a body that is."""
    return Refused(413, f"The body is larger than {LARGEST_BODY // 10**6} MB.", "too_large")
