"""Bodies: how much of a request's may arrive, how long, with how much memory, and how JSON is read and written.

What grows with a body runs in worker threads: the event loop does nothing that takes long. Python's JSON parser holds
the interpreter's lock until it has read the whole text, and a small value takes a hundred times its bytes, so the
structure of a large body is counted before it is read.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.message import Message as Header
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from kvkeep.native.library import trim_memory
from kvkeep.serve.http.errors import CLOSE, APIError, api_error

T = TypeVar("T")
Schema = TypeVar("Schema", bound=BaseModel)

MAX_BODY_BYTES = 8_000_000
BODY_TIMEOUT_S = 60.0
"""Seconds for a body to arrive."""
MAX_REQUEST_BYTES = 256_000_000
"""Bytes of all requests together. A larger body than :data:`ALWAYS_BYTES` is refused beyond them."""
ALWAYS_BYTES = 64_000
"""Bytes of one request that are never refused, so that large bodies of some clients do not lock out the others."""
BYTES_PER_TOKEN = 36
"""Bytes of a token id of a prompt: a Python integer and its place in a list."""
MAX_CONTAINERS = 120_000
"""Objects and lists of a body."""
MAX_NAMES = 160_000
"""Fields of all objects."""
MAX_VALUES = 1_200_000
"""Values that a comma separates: elements of all lists, and fields of all objects."""
MAX_STRINGS = 400_000
"""Strings, names included."""
SMALL_BYTES = 200_000
"""Bytes of a body that is read without counting: it is too short to have many more parts than allowed."""
LARGE_BYTES = 64_000
"""Bytes of a body from which on it counts as large: one such body at a time is worked on."""
WORKERS = 6
"""Threads for all other work."""

# -- arrival ----------------------------------------------------------------------------------------------


class RequestMemory:
    """Counts the bytes of all requests, of which there are at most ``limit``: of their bodies as they arrive, then of
    their prompts, until the response ends. Only the event loop uses it."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self.turns = asyncio.Lock()


class Hold:
    """The bytes of one request."""

    def __init__(self, memory: RequestMemory) -> None:
        self._memory, self.bytes = memory, 0

    def resize(self, count: int) -> None:
        """Hold ``count`` bytes. Raises APIError if all requests together would hold too many."""
        total = self._memory.bytes + count - self.bytes
        if count > max(self.bytes, ALWAYS_BYTES) and total > self._memory.limit:
            sentence = (
                f"The requests under way would take more than {self._memory.limit // 10**6} MB, the most that this "
                "server keeps for them; retry in a moment."
            )
            raise APIError(503, sentence, "overloaded", headers=CLOSE)
        self._memory.bytes, self.bytes = total, count

    async def turn(self) -> None:
        """Wait until this large body may go on. In each pass of the event loop one of them does, so that it is short
        however many arrive at once."""
        async with self._memory.turns:
            await asyncio.sleep(0)

    def tokens(self, count: int) -> None:
        """Hold a prompt of ``count`` tokens, and no body. Raises APIError as :meth:`resize` does."""
        self.resize(count * BYTES_PER_TOKEN)

    def moved(self) -> Hold:
        """Return another hold of these bytes, which this one no longer counts."""
        other = Hold(self._memory)
        other.bytes, self.bytes = self.bytes, 0
        return other

    def release(self) -> None:
        """Hold nothing."""
        self.resize(0)


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return the key in ``headers``, if any: ``Authorization: Bearer``, or ``x-api-key`` of Anthropic's clients."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


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


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. Raises APIError if the client disconnects first, and the errors of ``work``."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    disconnected, done = asyncio.ensure_future(disconnect()), asyncio.ensure_future(work)
    try:
        await asyncio.wait({disconnected, done}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise _disconnected()
        return done.result()
    finally:
        disconnected.cancel()
        done.cancel()


def _disconnected() -> APIError:
    return APIError(499, "The client has disconnected.")


# -- workers ----------------------------------------------------------------------------------------------

_large = ThreadPoolExecutor(1, thread_name_prefix="kvkeep-large")


def start_workers() -> None:
    """Start all worker threads of the running event loop. Later, when memory is short, a thread may end before it has
    begun, and Python waits for it without end."""
    global _large
    _large = ThreadPoolExecutor(1, thread_name_prefix="kvkeep-large")  # a forked process has no threads
    others = ThreadPoolExecutor(WORKERS, thread_name_prefix="kvkeep-worker")
    for pool, count in ((_large, 1), (others, WORKERS)):
        all_there = threading.Barrier(count + 1)
        try:
            for _ in range(count):
                pool.submit(all_there.wait)
        except BaseException:  # a thread cannot be started: at its end, the process waits for the others
            all_there.abort()
            raise
        all_there.wait()
    asyncio.get_running_loop().set_default_executor(others)


async def in_worker(size: int, call: Callable[..., T], *given: Any) -> T:
    """Return the result of ``call``, run in a worker thread. size: bytes of the body that it works on. Work on large
    bodies runs one at a time, so that it takes the memory of one, and small ones do not wait for it."""
    if size < LARGE_BYTES:
        return await asyncio.to_thread(call, *given)
    return await asyncio.get_running_loop().run_in_executor(_large, _trimmed, call, *given)


def _trimmed(call: Callable[..., T], *given: Any) -> T:
    """Return the result of ``call``. What it has freed goes back to the system, which other threads do not wait for."""
    try:
        return call(*given)
    finally:
        trim_memory()


# -- fields -----------------------------------------------------------------------------------------------


async def read_body(request: Request, schema: type[Schema]) -> Schema:
    """Return the body of a request. Raises APIError if it is not one of this schema."""
    parts = list[bytes]()
    while (message := await request.receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    else:
        raise _disconnected()
    del message
    size, kind = sum(map(len, parts)), request.headers.get("content-type", "")
    found = await unless_disconnected(request, in_worker(size, _parsed, schema, parts, kind))
    if isinstance(found, APIError):
        raise found
    return found


def _parsed(schema: type[Schema], parts: list[bytes], kind: str) -> Schema | APIError:
    """Return the fields of a body, or the error: raised, its traceback would keep the body. The parts are freed."""
    body = b"".join(parts)
    parts.clear()
    if not body:
        return APIError(400, "The request body is required.", "invalid_value")
    if not _is_json(kind):
        return APIError(400, "Send the request body with 'Content-Type: application/json'.", "invalid_json")
    try:
        return schema.model_validate(read_json(body))
    except (ValidationError, APIError) as error:
        return api_error(error).with_traceback(None)


def _is_json(kind: str) -> bool:
    header = Header()
    header["content-type"] = kind
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


_LIMITS = (
    ("objects and lists", rb"[{", MAX_CONTAINERS),
    ("fields", rb":", MAX_NAMES),
    ("values", rb",", MAX_VALUES),
)


def read_json(body: bytes) -> Any:
    """Return the value of a JSON text in UTF-8. Raises APIError for any other text, and for one with too many parts."""
    if len(body) > SMALL_BYTES:
        _check_structure(body)
    with suppress(ValueError, RecursionError):  # no JSON, numbers of thousands of digits, nested too deeply
        return json.loads(body.decode("utf-8-sig"))
    raise APIError(400, "The request body is not valid JSON.", "invalid_json")  # without a cause, which keeps the text


def _check_structure(body: bytes) -> None:
    quotes = ("strings", b'"', 2 * MAX_STRINGS)
    if not any(_count(body, signs) > limit for _, signs, limit in (*_LIMITS, quotes)):  # also of signs within strings
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in body else body
    if unescaped.count(b'"') > 2 * MAX_STRINGS:
        raise _too_many("strings", MAX_STRINGS)
    outside = b"".join(unescaped.split(b'"')[::2])
    for what, signs, limit in _LIMITS:
        if _count(outside, signs) > limit:
            raise _too_many(what, limit)


def _count(text: bytes, signs: bytes) -> int:
    return sum(text.count(bytes([sign])) for sign in signs)


def _too_many(what: str, limit: int) -> APIError:
    sentence = f"The request body has more than {limit:,} {what}; send fewer messages, parts or list elements."
    return APIError(400, sentence, "too_complex")


# -- replies ----------------------------------------------------------------------------------------------

_SLICE = 256
"""Elements that are written in one call, which holds the interpreter's lock."""
_dumped = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_text(value: Any) -> str:
    """Return a value as JSON. Between two slices of a long list, other threads run."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_dumped(name)}:{json_text(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list) and len(value) > _SLICE:
        slices = (value[first : first + _SLICE] for first in range(0, len(value), _SLICE))
        return "[" + ",".join(_dumped(one)[1:-1] for one in slices) + "]"
    return _dumped(value)


async def json_response(make: Callable[..., Mapping[str, Any]], *given: Any) -> Response:
    """Return what ``make`` returns as a response. Both it and the JSON are made in a worker thread."""
    text = await asyncio.to_thread(lambda: json_text(make(*given)).encode())
    return Response(text, media_type="application/json")
