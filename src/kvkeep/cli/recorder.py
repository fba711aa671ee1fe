"""A server without a model: it records the longest request of a client, for ``kvkeep warm``."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

RECORDED = "kvkeep has recorded this request and does not answer it; leave the agent."
PATHS = ("/chat/completions", "/completions", "/responses", "/messages")
"""The ends of the paths of requests for an answer."""


class RequestRecorder:
    """Receives the requests of one client."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.longest = b""
        """The longest body with tools, else the longest one, as it was sent."""
        self._tools = False
        self._lock = threading.Lock()

    def take(self, path: str, body: bytes) -> None:
        """Keep the body of a request to ``path``, if it is one for an answer."""
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            return
        if not isinstance(given, dict) or not urlsplit(path).path.rstrip("/").endswith(PATHS):
            return
        with self._lock:
            tools = bool(given.get("tools"))
            if (tools, len(body)) > (self._tools, len(self.longest)):
                self._tools, self.longest = tools, body

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Listen on a free port of this machine within the block, and yield the URL."""
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                found = {"id": recorder.model, "object": "model", "created": 0, "owned_by": "kvkeep"}
                self._send(200, {"object": "list", "data": [found]})

            def do_POST(self) -> None:
                recorder.take(self.path, self.rfile.read(int(self.headers.get("Content-Length", 0))))
                self._send(400, {"type": "error", "error": {"type": "invalid_request_error", "message": RECORDED}})

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def _send(self, status: int, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", f"{len(data)}")
                self.end_headers()
                self.wfile.write(data)

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, name="kvkeep-recorder", daemon=True).start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}"
            finally:
                server.shutdown()
