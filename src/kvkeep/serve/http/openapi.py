"""The schema at ``/openapi.json``: FastAPI's, with the key and the errors of each route."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvkeep.serve.http.body import MAX_BODY_BYTES
from kvkeep.serve.http.middleware import PUBLIC_PATHS
from kvkeep.serve.http.schema import ChatRequest, TextRequest, TokenizeRequest

_PLACE = "#/components/schemas/{model}"

ERRORS: dict[int | str, str] = {
    400: "The request is invalid; param names the field.",
    401: "The key is wrong or missing.",
    404: "The model does not exist, or the key has no such session.",
    409: "The session is in use, or belongs to another model, tokenizer or version.",
    413: f"The request body is larger than {MAX_BODY_BYTES // 10**6} MB.",
    429: "The key has reached its limit of concurrent requests; retry after Retry-After seconds.",
    503: "The queue or the memory for requests is full, the server is shutting down or does not respond, or the store "
    "cannot be used; retry after Retry-After seconds.",
    "default": "Any other error, in the same form.",
}


class ErrorDetail(BaseModel):
    """The error: a sentence, OpenAI's type and code, and the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


def error_responses(*statuses: int | str) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route for FastAPI. 401 is added to all routes that need a key."""
    return {status: {"model": ErrorResponse, "description": ERRORS[status]} for status in statuses}


def takes(schema: type[BaseModel]) -> dict[str, Any]:
    """Return the request body of a route for FastAPI, which would itself read it in the event loop."""
    content = {"application/json": {"schema": {"$ref": _PLACE.format(model=schema.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


class DocumentedApp(FastAPI):
    """An application with a complete schema."""

    def openapi(self) -> dict[str, Any]:
        """Return the schema."""
        if self.openapi_schema is None:
            self.openapi_schema = _completed(get_openapi(title=self.title, version=self.version, routes=self.routes))
        return self.openapi_schema


def _completed(found: dict[str, Any]) -> dict[str, Any]:
    parts = found["components"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's validation errors, which clients never receive
        parts["schemas"].pop(name, None)
    bodies = [(schema, "validation") for schema in (ChatRequest, TextRequest, TokenizeRequest)]
    parts["schemas"] |= models_json_schema(bodies, ref_template=_PLACE)[1]["$defs"]  # type: ignore[arg-type]
    parts["schemas"] = dict(sorted(parts["schemas"].items()))
    parts["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "One of the server's keys, if it has any."}
    }
    for path, operations in found["paths"].items():
        for operation in operations.values():
            operation["summary"] = operation.pop("description").partition(". ")[0].rstrip(".")
            operation["responses"].pop("422", None)
            if path in PUBLIC_PATHS:
                operation["responses"].pop("401")
            else:
                operation["security"] = [{"key": []}]
            operation["responses"] = dict(sorted(operation["responses"].items()))
    return found
