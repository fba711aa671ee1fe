"""The pages at ``/`` and ``/docs``, which load nothing from other hosts, and the schema that the second one shows."""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvkeep.serve.http.body import MAX_BODY_BYTES
from kvkeep.serve.http.completions import ChatRequest, TextRequest, TokenizeRequest
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.middleware import PUBLIC_PATHS

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Headers of the pages. By the first one, a browser lets a page load its files and call its server, nothing else."""


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


# -- the schema -------------------------------------------------------------------------------------------

_PLACE = "#/components/schemas/{model}"
ERRORS = {
    400: "The request is invalid; param names the field.",
    401: "The key is wrong or missing.",
    404: "There is no such path or model, or the key has no such session.",
    409: "The session is in use, or belongs to another model, tokenizer or version.",
    413: f"The request body is larger than {MAX_BODY_BYTES // 10**6} MB.",
    429: "The key has reached its limit of concurrent requests; retry after Retry-After seconds.",
    503: "The queue or the memory for requests is full, the server is shutting down or does not respond, or the store "
    "cannot be used; retry after Retry-After seconds.",
    "default": "Any other error, in the same form.",
}
"""The errors that a request may get."""


class ErrorDetail(BaseModel):
    """The error: a sentence, OpenAI's type and code, and the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


def takes(schema: type[BaseModel], streams: bool = False) -> dict[str, Any]:
    """Return what FastAPI's schema says of a route that reads a body itself, in a worker thread. streams: whether its
    reply may be a stream."""
    content = {"application/json": {"schema": {"$ref": _PLACE.format(model=schema.__name__)}}}
    made: dict[str, Any] = {"requestBody": {"required": True, "content": content}}
    return made | ({"responses": {"200": {"content": {"text/event-stream": {}}}}} if streams else {})


class DocumentedApp(FastAPI):
    """An application with a schema of all requests, and without FastAPI's pages, which load scripts of another host."""

    def __init__(self, **given: Any) -> None:
        errors: Any = {status: {"model": ErrorResponse, "description": about} for status, about in ERRORS.items()}
        super().__init__(
            title="kvkeep", responses=errors, redirect_slashes=False, docs_url=None, redoc_url=None, **given
        )

    def openapi(self) -> dict[str, Any]:
        """Return the schema."""
        if self.openapi_schema is None:
            found = get_openapi(title=self.title, version=version("kvkeep"), routes=self.routes)
            bodies = [(schema, "validation") for schema in (ChatRequest, TextRequest, TokenizeRequest)]
            schemas = found["components"]["schemas"]
            schemas |= models_json_schema(bodies, ref_template=_PLACE)[1]["$defs"]  # type: ignore[arg-type]
            found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path, operations in found["paths"].items():
                for operation in operations.values():
                    operation["summary"] = operation.pop("description").partition(". ")[0].rstrip(".")
                    operation["responses"].pop("422", None)  # FastAPI's own error, which no client gets
                    if path not in PUBLIC_PATHS:
                        operation["security"] = [{"key": []}]
            self.openapi_schema = found
        return self.openapi_schema
