"""Errors as OpenAI's clients read them: one object, one status, one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from kvkeep.errors import (
    BudgetError,
    KvkeepError,
    SessionBusy,
    SessionDamaged,
    SessionError,
    SessionUnwritable,
    UsageError,
)
from kvkeep.serve.http.refused import Refused
from kvkeep.serve.job import Differs, Full, Stopping, TooLong

FAILED = "failed"
"""The code of what no client is to blame for."""

_TYPES = ("str", "int")
_JSON = "application/json"
_OBJECTS = {"dict_type", "model_type", "model_attributes_type"}
_TAKES = dict.fromkeys(_OBJECTS, "an object") | {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
}
"""What a field takes, by the error of another type; of a field of several types there is an error of each."""
_REASONS = {
    "extra_forbidden": "is not supported here",
    "unsupported": "is not supported here",
    "missing": "is missing",
    "string_unicode": "has half a character (a lone surrogate)",
    "literal_error": "is not supported but as {expected}",
    "too_short": "has a length of {actual_length}, and takes at least {min_length}",
    "too_long": "has a length of {actual_length}, and takes at most {max_length}",
    "greater_than_equal": "takes at least {ge}",
    "less_than_equal": "takes at most {le}",
    "less_than": "takes less than {lt}",
}


def refused(error: Exception) -> Refused:
    """Return how any error is told."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, AnyHTTPException):
        if error.status_code == 400:  # the body is no text, or nests deeper than it can be read
            return _unreadable()
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return Refused(error.status_code, f"{error.detail}.", code, headers=error.headers)
    if isinstance(error, Full):
        return Refused(503, str(error), "overloaded")
    if isinstance(error, Stopping):
        return Refused(503, str(error), "stopping")
    if isinstance(error, BudgetError):
        return Refused(400, str(error), "budget", "kvkeep.budget")
    if isinstance(error, Differs):
        return Refused(400, str(error), "session_differs", "kvkeep.session")
    if isinstance(error, UsageError):
        return Refused(400, str(error), "context_length_exceeded" if isinstance(error, TooLong) else "invalid_value")
    if isinstance(error, SessionBusy):
        what = str(error).partition(";")[0].rstrip(".")  # the rest is for who can end the other program
        return Refused(409, f"{what}; ask again in a moment.", "session_in_use", headers={"Retry-After": "1"})
    if isinstance(error, SessionError) and not isinstance(error, SessionDamaged | SessionUnwritable):
        return Refused(409, str(error), "session")  # of another model, tokenizer or version
    if isinstance(error, KvkeepError):
        return Refused(500, str(error), FAILED)
    return Refused(500, f"The request failed ({type(error).__name__}).", FAILED)


@contextmanager
def by_field(field: str) -> Iterator[None]:
    """Tell a UsageError within by the field of the request that it is of. Raises Refused."""
    try:
        yield
    except UsageError as error:
        found = refused(error)
        raise Refused(found.status_code, found.detail, found.code, field) from error


async def told(request: Request, error: Exception) -> JSONResponse:
    """Return what a handler raised as an error object."""
    found: Refused = request.app.state.metrics.rejected(error)
    return found.response()


async def misread(request: Request, error: Exception) -> JSONResponse:
    """Return what is wrong with a body, by the name of the field."""
    assert isinstance(error, RequestValidationError)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return await told(request, _misread(error, kind))


def _misread(error: RequestValidationError, kind: str) -> Refused:
    # Of a field of several types there is an error of each; the deepest is of the one that was meant.
    found = [(_place(one["loc"]), one) for one in error.errors()]
    place, first = max(found, key=lambda one: (len(one[0]), one[1]["type"] not in _TAKES))
    if first["type"] == "json_invalid":
        return _unreadable()
    if not place and first["type"] in _OBJECTS:
        remedy = "it is no object" if kind == _JSON else f"send it with 'Content-Type: {_JSON}'"
        return Refused(400, f"The body is wrong: {remedy}.", "invalid_json")
    field = ".".join(place) or None
    wanted = dict.fromkeys(_TAKES.get(one["type"]) for where, one in found if where == place)
    context = first.get("ctx", {})
    if None not in wanted:
        reason = f"takes {' or '.join(map(str, wanted))}"
    elif first["type"] in _REASONS:
        reason = _REASONS[first["type"]].format(**context)
    else:
        reason = f"is wrong: {first['msg'][:1].lower()}{first['msg'][1:]}"
    name = "The body" if field is None else f"'{field}'"
    return Refused(400, f"{name} {reason}.", "invalid_value", field)


def _unreadable() -> Refused:
    return Refused(400, "The body cannot be read as JSON.", "invalid_json")


def _place(where: Sequence[Any]) -> list[str]:
    """Return the names and numbers that lead to a field, without those of types."""
    return [
        str(one) for one in where[1:] if not isinstance(one, str) or not (one in _TYPES or "[" in one or "-" in one)
    ]


HANDLERS: dict[Any, Any] = {
    RequestValidationError: misread,
    AnyHTTPException: told,
    KvkeepError: told,
}
