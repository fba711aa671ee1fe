"""From the body of a request to its fields, in a worker thread."""

from __future__ import annotations

from email.message import Message
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from kvkeep.serve.http.disconnect import unless_disconnected
from kvkeep.serve.http.error_handlers import validation_error
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.structure import read_json
from kvkeep.serve.http.workers import in_worker

Schema = TypeVar("Schema", bound=BaseModel)


async def read_body(request: Request, schema: type[Schema]) -> Schema:
    """Return the body of a request. Raises APIError if it is not one of this schema."""
    parts = list[bytes]()
    while (message := await request.receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    else:
        raise APIError(499, "The client has disconnected.")
    del message
    size, kind = sum(map(len, parts)), request.headers.get("content-type", "")
    found = await unless_disconnected(request, in_worker(size, _parsed, schema, parts, kind))
    if isinstance(found, APIError):
        raise found
    return found


def _parsed(schema: type[Schema], parts: list[bytes], kind: str) -> Schema | APIError:
    """Return the fields of a body, or the error: raised, it would keep the body through its traceback. The parts are
    freed."""
    body = b"".join(parts)
    parts.clear()
    if not body:
        return APIError(400, "The request body is required.", "invalid_value")
    if not _is_json(kind):
        return APIError(400, "Send the request body with 'Content-Type: application/json'.", "invalid_json")
    try:
        return schema.model_validate(read_json(body))
    except ValidationError as error:
        return validation_error(error.errors(include_url=False, include_input=False))
    except APIError as error:
        return error.with_traceback(None)


def _is_json(kind: str) -> bool:
    message = Message()
    message["content-type"] = kind
    return message.get_content_maintype() == "application" and (
        message.get_content_subtype() == "json" or message.get_content_subtype().endswith("+json")
    )
