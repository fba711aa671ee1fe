"""The chat page at ``/``: files of this package, which load nothing from other hosts."""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvkeep.serve.http.errors import APIError

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Headers of the page. By the first one, a browser lets a page load its files and call its server, nothing else."""


def page_routes() -> APIRouter:
    """Return the routes of the page."""
    routes = APIRouter()
    folder = resources.files("kvkeep.serve").joinpath("page")
    files = {one.name: one.read_bytes() for one in folder.iterdir() if one.name.rpartition(".")[2] in TYPES}
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, content in files.items()}

    @routes.get("/")
    async def index(request: Request) -> Response:
        """Return the chat page."""
        return await file(request, "index.html")

    @routes.get("/page/{name}")
    async def file(request: Request, name: str) -> Response:
        """Return a file of the page."""
        if name not in files:
            raise APIError(404, f"The page has no file '{name}'.")
        headers = {**HEADERS, "ETag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(files[name], media_type=TYPES[name.rpartition(".")[2]], headers=headers)

    return routes
