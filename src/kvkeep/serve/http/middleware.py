"""The processing of every request before its route: request id, key, size and time limits, log line."""

from __future__ import annotations

import ipaddress
import logging
import sys
import time
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvkeep.errors import place_of
from kvkeep.native.room import has_room
from kvkeep.serve.engine import ROOM_BYTES
from kvkeep.serve.http.body import Hold, RequestMemory, check_headers, limit_body
from kvkeep.serve.http.errors import APIError, new_request_id
from kvkeep.serve.http.keys import Keys
from kvkeep.serve.http.metrics import Metrics

PUBLIC_PATHS = ("/health", "/ready", "/")
PAGE_PREFIX = "/page/"
"""The prefix of paths that need no key, in addition to :data:`PUBLIC_PATHS`: the files of the page."""

log = logging.getLogger(__name__)
request_log = logging.getLogger("kvkeep.requests")
"""One line per request at its end, at level INFO: id (the response's ``x-request-id``), method, path, status and
seconds."""


class RequestMiddleware:
    """Checks the key and limits the body (:mod:`~kvkeep.serve.http.body`). Routes read the owner of a request from
    ``request.state.owner``, and its memory from ``request.state.hold``. Unexpected errors are logged by type and
    place, never by message, which may quote a prompt.

    A server without keys answers only requests whose Host is this machine. This prevents DNS rebinding, in which
    another site's page uses the server under the site's name.
    """

    def __init__(self, app: ASGIApp, keys: Keys, metrics: Metrics, memory: RequestMemory) -> None:
        self.app, self.keys, self.metrics, self.memory = app, keys, metrics, memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, request_id = time.monotonic(), 0, new_request_id()
        head = scope["method"] == "HEAD"  # answered as a GET, without a body
        hold = Hold(self.memory)
        state = {**scope.get("state", {}), "hold": hold}
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
            await found.response()(scope, receive, send_with_id)
        finally:
            hold.release()
            path, seconds = quote(scope["path"]), time.monotonic() - started  # quoted: always one line
            request_log.info("%s %s %s %d %.2f s", request_id, scope["method"], path, status, seconds)

    def _authorize(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if not self.keys and not _is_loopback(headers.get("host", "")):
            sentence = (
                "A server without keys only answers requests to 'localhost'; start it with a key for other names."
            )
            raise APIError(403, sentence, "wrong_host")
        if scope["path"] not in PUBLIC_PATHS and not scope["path"].startswith(PAGE_PREFIX):
            scope["state"]["owner"] = self.keys.owner(headers.get("authorization"))


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
