"""The schema at ``/openapi.json``: what FastAPI knows of the routes, with the key and the errors that they have."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvkeep.serve.http.door import LARGEST_BODY, OPEN

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ERRORS = {
    400: "The request is wrong; param names the field.",
    401: "The key is wrong or missing.",
    404: "There is no such model, or no such session of this key.",
    409: "The session is in use, or is of another model, tokenizer or version.",
    413: f"The body is larger than {LARGEST_BODY // 10**6} MB.",
    429: "As many answers of this key are under way as may be; ask again after Retry-After seconds.",
    503: "Too many requests wait, or the server does not answer or is ending; ask again after Retry-After seconds.",
}
_ANSWERS = (400, 404, 409, 413, 429, 503)
_OF = {
    ("post", CHAT): _ANSWERS,
    ("post", TEXT): _ANSWERS,
    ("post", "/tokenize"): (400, 404, 413),
    ("get", "/v1/models/{name}"): (404,),
    ("get", "/v1/sessions/{name}"): (404,),
    ("delete", "/v1/sessions/{name}"): (404, 409),
    ("get", "/v1/sessions/{name}/cache"): (400, 404, 503),
    ("get", "/v1/memory"): (503,),
    ("get", "/health"): (503,),
    ("get", "/ready"): (503,),
}
"""The errors of each request, beside 401 where a key is needed."""
_TEXT = {"type": ["string", "null"]}
ERROR = {
    "type": "object",
    "description": "What is wrong: a sentence, the class and code of the error, and the field that it is of.",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT, "code": _TEXT},
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


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
    parts["schemas"]["Error"] = ERROR
    parts["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "One of the server's keys; none where it has none."}
    }
    for path, operations in found["paths"].items():
        for method, own in operations.items():
            own["summary"] = own.pop("description").partition(". ")[0].rstrip(".")
            statuses = _OF.get((method, path), ())
            if path not in OPEN:
                own["security"], statuses = [{"key": []}], (401, *statuses)
            own["responses"].pop("422", None)
            if path in (CHAT, TEXT):
                own["responses"]["200"]["content"]["text/event-stream"] = {}
            own["responses"] |= {str(status): _error(ERRORS[status]) for status in sorted(statuses)}
            own["responses"]["default"] = _error("Any other error, in the same form.")
    return found


def _error(about: str) -> dict[str, Any]:
    return {"description": about, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
