"""The pages at ``/`` and ``/docs``: files of this package, which load nothing from other hosts."""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvkeep.serve.http.errors import APIError

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy: a browser lets a page load its files and call its server, nothing else."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """Return the routes of the pages."""
    routes = APIRouter(include_in_schema=False)
    folder = resources.files("kvkeep.serve").joinpath("page")
    files = {one.name: one.read_bytes() for one in folder.iterdir() if one.name.rpartition(".")[2] in TYPES}
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, content in files.items()}

    @routes.get("/")
    async def index(request: Request) -> Response:
        """Return the chat page."""
        return await file(request, "index.html")

    @routes.get("/docs")
    async def documentation(request: Request) -> Response:
        """Return the page that documents all requests."""
        return await file(request, "docs.html")

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
