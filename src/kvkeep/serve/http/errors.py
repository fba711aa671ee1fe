"""Errors as OpenAI's clients read them: one object, one status, one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import HTTPException, Request
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
from kvkeep.serve.job import Full, Stopping

AGAIN_S = 5
"""Seconds after which a client may ask again."""


_TYPES = ("str", "int")


class Refused(HTTPException):
    """A request is refused. code: as OpenAI names it. param: the field that is wrong."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message)
        self.code, self.param = code, param

    @property
    def kind(self) -> str:
        """The class of the error, as OpenAI names it."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(self.status_code)
        return kind or ("server_error" if self.status_code >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        return {"error": {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return it as an answer."""
        headers = {"Retry-After": str(AGAIN_S)} if self.status_code in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status_code == 401 else {}
        return JSONResponse(self.body(), self.status_code, headers)


def refused(error: Exception) -> Refused:
    """Return how any error is told."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, AnyHTTPException):
        if error.status_code == 400:  # the body is no text, or nests deeper than it can be read
            return _unreadable()
        return Refused(error.status_code, f"{error.detail}.")
    if isinstance(error, Full):
        return Refused(503, str(error), "overloaded")
    if isinstance(error, Stopping):
        return Refused(503, str(error), "stopping")
    if isinstance(error, BudgetError):
        return Refused(400, str(error), "budget")
    if isinstance(error, UsageError):
        code = "context_length_exceeded" if "positions" in str(error) else None
        return Refused(400, str(error), code)
    if isinstance(error, SessionBusy):
        return Refused(409, str(error), "session_in_use")
    if isinstance(error, SessionError) and not isinstance(error, SessionDamaged | SessionUnwritable):
        return Refused(409, str(error), "session")  # of another model, tokenizer or version
    if isinstance(error, KvkeepError):
        return Refused(500, str(error), "failed")
    return Refused(500, f"The request failed ({type(error).__name__}).", "failed")


async def told(request: Request, error: Exception) -> JSONResponse:
    """Return what a handler raised as an error object."""
    found = refused(error)
    request.app.state.metrics.rejected(found)
    return found.response()


async def misread(request: Request, error: Exception) -> JSONResponse:
    """Return what is wrong with a body, by the name of the field."""
    assert isinstance(error, RequestValidationError)
    return await told(request, _misread(error))


def _misread(error: RequestValidationError) -> Refused:
    # Of a field of several types there is an error of each; the deepest is of the one that was meant.
    place, first = max(((_place(one["loc"]), one) for one in error.errors()), key=lambda found: len(found[0]))
    if first["type"] == "json_invalid":
        return _unreadable()
    field = ".".join(place) or None
    reason = {
        "extra_forbidden": "is not supported here",
        "missing": "is missing",
        "literal_error": f"is not supported but as {first.get('ctx', {}).get('expected', 'it is by default')}",
    }.get(first["type"], f"is wrong: {first['msg'][:1].lower()}{first['msg'][1:]}")
    return Refused(400, f"'{field or 'the body'}' {reason}.", "invalid_value", field)


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
