"""The schema at ``/openapi.json``: what FastAPI knows of the routes, with the key and the errors that they have."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from kvkeep.serve.http.body import LARGEST_BODY
from kvkeep.serve.http.door import OPEN

ERRORS: dict[int | str, str] = {
    400: "The request is wrong; param names the field.",
    401: "The key is wrong or missing.",
    404: "There is no such model, or no such session of this key.",
    409: "The session is in use, or is of another model, tokenizer or version.",
    413: f"The body is larger than {LARGEST_BODY // 10**6} MB.",
    429: "As many answers of this key are under way as may be; ask again after Retry-After seconds.",
    503: "Too many requests wait, or the server does not answer or is ending; ask again after Retry-After seconds.",
    "default": "Any other error, in the same form.",
}


class Fault(BaseModel):
    """What is wrong: a sentence, the class and code of the error, and the field that it is of."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of every error."""

    error: Fault


def errors(*statuses: int | str) -> dict[int | str, dict[str, Any]]:
    """Return what a route says of its errors; 401, where a key is needed, is added for all of them."""
    return {status: {"model": Error, "description": ERRORS[status]} for status in statuses}


class Described(FastAPI):
    """An application whose schema says what its requests answer."""

    def openapi(self) -> dict[str, Any]:
        """Return the schema."""
        if self.openapi_schema is None:
            self.openapi_schema = _described(get_openapi(title=self.title, version=self.version, routes=self.routes))
        return self.openapi_schema


def _described(found: dict[str, Any]) -> dict[str, Any]:
    parts = found["components"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own error, which no request gets
        parts["schemas"].pop(name, None)
    parts["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "One of the server's keys; none where it has none."}
    }
    for path, operations in found["paths"].items():
        for own in operations.values():
            own["summary"] = own.pop("description").partition(". ")[0].rstrip(".")
            own["responses"].pop("422", None)
            if path in OPEN:
                own["responses"].pop("401")
            else:
                own["security"] = [{"key": []}]
            own["responses"] = dict(sorted(own["responses"].items()))
    return found
