"""The door: who may come in, with how much, and how long it may take, before a route sees anything of it."""

from __future__ import annotations

import ipaddress
import logging
import re
import sys
import time
from collections.abc import Sequence
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvkeep.errors import UsageError, place_of
from kvkeep.serve.http.body import LARGEST_BODY, limited, too_large
from kvkeep.serve.http.keys import Keys
from kvkeep.serve.http.metrics import Metrics
from kvkeep.serve.http.refused import Refused, new_id

OPEN = ("/health", "/ready", "/openapi.json", "/docs", "/")
PAGE = "/page/"
"""What needs no key: all of :data:`OPEN`, and what lies within the page."""

log = logging.getLogger(__name__)
requests = logging.getLogger("kvkeep.requests")
"""A line for each request at its end, at level INFO: its id, which is in the header of its answer, what was asked for,
the status and the seconds."""


class Door:
    """Lets those in who have a key, and :mod:`bodies <kvkeep.serve.http.body>` that are neither too large nor too slow.
    Whose a request is, routes find in ``request.state.owner``. A fault is logged by its kind and place alone: messages
    may quote a prompt.

    Where there are no keys, only requests to this machine by its own names are taken, so that no page of another host
    whose name was turned to this machine's address can speak for its user.
    """

    def __init__(self, app: ASGIApp, keys: Keys, metrics: Metrics) -> None:
        self.app, self.keys, self.metrics = app, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status, name = time.monotonic(), 0, new_id()
        head = scope["method"] == "HEAD"
        # A HEAD is answered as a GET, without a body; with a slash at the end a path is the same.
        scope = {**scope, "method": "GET" if head else scope["method"], "path": scope["path"].rstrip("/") or "/"}

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).append("x-request-id", name)
            await send({**message, "body": b""} if head and "body" in message else message)

        try:
            self._enter(scope)
            await self.app(scope, limited(receive), sending)
        except Exception as error:
            if not isinstance(error, Refused):
                log.error("%s failed: %s", name, place_of(error))
            found = self.metrics.rejected(error)
            if status:  # nothing can be said any more
                raise _Broken from None
            await found.response()(scope, receive, sending)
        finally:
            path, seconds = quote(scope["path"]), time.monotonic() - begun  # one line, whatever was asked for
            requests.info("%s %s %s %d %.2f s", name, scope["method"], path, status, seconds)

    def _enter(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if not self.keys and not _this_machine(headers.get("host", "")):
            raise Refused(403, "Without keys this server answers to 'localhost' alone; give it a key.", "wrong_host")
        if scope["path"] not in OPEN and not scope["path"].startswith(PAGE):
            scope.setdefault("state", {})["owner"] = self.keys.owner(headers.get("authorization"))
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > LARGEST_BODY:
            raise too_large()


def check_origins(origins: Sequence[str], keyed: bool) -> None:
    """Raise UsageError for what is no origin as browsers send it, and for any origin where no key is asked for."""
    for one in origins:
        if one != "*" and not re.fullmatch(r"https?://[^/\s?#]+", one):
            raise UsageError(
                f"'{one}' is no origin: give scheme and host, without a path (https://chat.example), or *."
            )
    if "*" in origins and not keyed:
        raise UsageError("Without a key, pages of any origin could use the server; name origins, or give it a key.")


def log_all() -> None:
    """Have every request logged on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    requests.addHandler(handler)
    requests.setLevel(logging.INFO)
    requests.propagate = False


class _Broken(Exception):
    """An answer broke off after its beginning was sent."""


def _this_machine(host: str) -> bool:
    """Return whether a Host header names this machine as only itself can."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name.lower() == "localhost"
