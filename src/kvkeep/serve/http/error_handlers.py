"""Converts every exception of a request into an error for its client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from kvkeep.errors import (
    BudgetError,
    EntriesLost,
    KvkeepError,
    OutOfMemory,
    SessionBusy,
    SessionDamaged,
    SessionError,
    SessionUnwritable,
    StoreError,
    UsageError,
    ran_out_of_memory,
)
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.job import EngineStopping, PromptTooLong, QueueFull, SessionMismatch

FAILED = "failed"
"""The code of an error that the client did not cause."""

_NO_MEMORY = "The server ran out of memory while reading the request; retry later, or send a shorter one."
_TYPES = ("str", "int")
_OBJECTS = {"dict_type", "model_type", "model_attributes_type"}
_EXPECTED = dict.fromkeys(_OBJECTS, "an object") | {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
}
"""The expected kind of a field, by the type of pydantic's error. A field of several types has an error for each."""
_REASONS = {
    "extra_forbidden": "is not supported",
    "unsupported": "is not supported",
    "missing": "is required",
    "string_unicode": "contains half a character (a lone surrogate)",
    "finite_number": "has to be a finite number",
    "literal_error": "has to be {expected}",
    "too_short": "has {actual_length} elements and needs at least {min_length}",
    "too_long": "has {actual_length} elements, and at most {max_length} are allowed; send fewer",
    "string_too_short": "needs at least {min_length} characters",
    "string_too_long": "may have at most {max_length} characters; shorten it",
    "greater_than_equal": "has to be at least {ge}",
    "less_than_equal": "has to be at most {le}",
    "less_than": "has to be less than {lt}",
}


def api_error(error: Exception) -> APIError:
    """Return the client's error for any exception."""
    if isinstance(error, APIError):
        return error
    if ran_out_of_memory(error):
        sentence = str(error) if isinstance(error, OutOfMemory) else _NO_MEMORY
        return APIError(503, sentence, "out_of_memory")
    if isinstance(error, AnyHTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return APIError(error.status_code, f"{error.detail}.", code, headers=error.headers)
    if isinstance(error, QueueFull):
        return APIError(503, str(error), "overloaded")
    if isinstance(error, EngineStopping):
        return APIError(503, str(error), "stopping")
    if isinstance(error, BudgetError):
        return APIError(400, str(error), "budget", "kvkeep.budget")
    if isinstance(error, SessionMismatch):
        return APIError(400, str(error), "session_differs", "kvkeep.session")
    if isinstance(error, UsageError):
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else "invalid_value"
        return APIError(400, str(error), code)
    if isinstance(error, SessionBusy):
        what = str(error).partition(";")[0].rstrip(".")  # the rest advises to end the other program
        return APIError(409, f"{what}; retry in a moment.", "session_in_use", headers={"Retry-After": "1"})
    if isinstance(error, SessionUnwritable):  # its message may name a path
        return APIError(503, "The store of sessions cannot be used now; retry later.", "store_unavailable")
    if isinstance(error, SessionError) and not isinstance(error, SessionDamaged):
        return APIError(409, str(error), "session")  # the session has another model, tokenizer or version
    if isinstance(error, EntriesLost):
        sentence = "The server's disk has lost entries of this conversation; send the request again, to read them anew."
        return APIError(503, sentence, "entries_lost")
    if isinstance(error, StoreError):  # its message may name a path
        return APIError(503, "The server's disk cannot be used now; retry later.", "store_unavailable")
    if isinstance(error, KvkeepError):
        return APIError(500, str(error), FAILED)
    return APIError(500, f"The request failed with an internal error ({type(error).__name__}).", FAILED)


@contextmanager
def naming_field(field: str) -> Iterator[None]:
    """Convert a UsageError of the block to an APIError that names the request's field."""
    try:
        yield
    except UsageError as error:
        found = api_error(error)
        raise APIError(found.status_code, found.detail, found.code, field) from error


async def handle(request: Request, error: Exception) -> JSONResponse:
    """Return the response for an exception of a route."""
    found: APIError = request.app.state.metrics.rejected(error)
    return found.response()


async def handle_validation(request: Request, error: Exception) -> JSONResponse:
    """Return the response for a request whose path or query violates its schema."""
    assert isinstance(error, RequestValidationError)
    return await handle(request, validation_error([{**one, "loc": one["loc"][1:]} for one in error.errors()]))


def validation_error(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """Return the client's error for pydantic's errors of a request."""
    # A field of several types has an error for each; the deepest one is of the intended type.
    found = [(_place(one["loc"]), one) for one in errors]
    place, first = max(found, key=lambda one: (len(one[0]), one[1]["type"] not in _EXPECTED))
    if not place and first["type"] in _OBJECTS:
        return APIError(400, "The request body has to be a JSON object.", "invalid_json")
    field = ".".join(place) or None
    expected = dict.fromkeys(_EXPECTED.get(one["type"]) for where, one in found if where == place)
    context = first.get("ctx", {})
    if None not in expected:
        reason = f"has to be {' or '.join(map(str, expected))}"
    elif first["type"] in _REASONS:
        reason = _REASONS[first["type"]].format(**context)
    else:
        reason = f"is wrong: {first['msg'][:1].lower()}{first['msg'][1:]}"
    name = "The request body" if field is None else f"'{field}'"
    return APIError(400, f"{name} {reason}.", "invalid_value", field)


def _place(where: Sequence[Any]) -> list[str]:
    """Return the path to a field: names and numbers, without the names of types."""
    return [str(one) for one in where if not isinstance(one, str) or not (one in _TYPES or "[" in one or "-" in one)]


HANDLERS: dict[Any, Any] = {
    RequestValidationError: handle_validation,
    AnyHTTPException: handle,
    KvkeepError: handle,
}
