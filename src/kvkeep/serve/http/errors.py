"""The error of a request in the form of OpenAI's clients: one object, one status, one sentence."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException as AnyHTTPException

from kvkeep.errors import (
    BudgetError,
    EngineStopping,
    EntriesLost,
    KvkeepError,
    OutOfMemory,
    PromptTooLong,
    QueueFull,
    SessionBusy,
    SessionDamaged,
    SessionError,
    SessionMismatch,
    SessionUnwritable,
    StoreError,
    UsageError,
    ran_out_of_memory,
)

RETRY_AFTER_S = 5
"""``Retry-After`` of 429 and 503."""
CLOSE = {"Connection": "close"}
"""The header of a response after which the server closes the connection."""
MAX_SENTENCE, MAX_PARAM = 1000, 200
"""Characters of an error's sentence and field; they may quote what the client sent."""
ANTHROPIC = "/v1/messages"
"""The prefix of paths whose clients are Anthropic's."""
FAILED = "failed"
"""The code of an error that the client did not cause."""


def new_request_id() -> str:
    """Return an id for a request. The response has it as ``x-request-id``."""
    return f"req-{secrets.token_hex(8)}"


class APIError(HTTPException):
    """An error response to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > MAX_SENTENCE:
            message = f"{message[:MAX_SENTENCE]} (and more)."
        super().__init__(status, message, {**(headers or {})})
        self.code = code
        """A machine-readable reason; OpenAI's code if there is one."""
        self.param = None if param is None else param[:MAX_PARAM]
        """The wrong field of the request."""

    @property
    def kind(self) -> str:
        """OpenAI's ``type`` of the error."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(self.status_code)
        return kind or ("server_error" if self.status_code >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        return {"error": {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Return the error object as Anthropic's clients read it."""
        kind = {403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}.get(self.status_code)
        kind = kind or ("api_error" if self.status_code >= 500 else self.kind)
        return {"type": "error", "error": {"type": kind, "message": self.detail}}

    def response(self, path: str = "") -> JSONResponse:
        """Return the error as an HTTP response to a request for ``path``."""
        retry = self.status_code in (429, 503)
        headers = ({"Retry-After": str(RETRY_AFTER_S)} if retry else {}) | {**(self.headers or {})}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status_code == 401 else {}
        body = self.anthropic() if path.startswith(ANTHROPIC) else self.body()
        return JSONResponse(body, self.status_code, headers)


# -- any exception ----------------------------------------------------------------------------------------

_NO_MEMORY = "The server ran out of memory while reading the request; retry later, or send a shorter one."
_LOST = "The server's disk has lost entries of this conversation; send the request again, to read them anew."
_KINDS: tuple[tuple[type[Exception], int, str, str | None, str], ...] = (
    (QueueFull, 503, "overloaded", None, ""),
    (EngineStopping, 503, "stopping", None, ""),
    (BudgetError, 400, "budget", "kvkeep.budget", ""),
    (SessionMismatch, 400, "session_differs", "kvkeep.session", ""),
    (PromptTooLong, 400, "context_length_exceeded", None, ""),
    (UsageError, 400, "invalid_value", None, ""),
    (SessionUnwritable, 503, "store_unavailable", None, "The store of sessions cannot be used now; retry later."),
    (SessionDamaged, 500, FAILED, None, ""),
    (SessionError, 409, "session", None, ""),  # the session has another model, tokenizer or version
    (EntriesLost, 503, "entries_lost", None, _LOST),
    (StoreError, 503, "store_unavailable", None, "The server's disk cannot be used now; retry later."),
    (KvkeepError, 500, FAILED, None, ""),
)
"""Status, code, field and sentence of errors, of which the first that fits counts. Empty: the error's own sentence,
which for the others may name a path."""


def api_error(error: Exception) -> APIError:
    """Return the client's error for any exception."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, ValidationError):
        return validation_error(error.errors(include_url=False, include_input=False))
    if isinstance(error, RequestValidationError):  # of a path or a query, which begins each place
        return validation_error([{**one, "loc": one["loc"][1:]} for one in error.errors()])
    if ran_out_of_memory(error):
        return APIError(503, str(error) if isinstance(error, OutOfMemory) else _NO_MEMORY, "out_of_memory")
    if isinstance(error, AnyHTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return APIError(error.status_code, f"{error.detail}.", code, headers=error.headers)
    if isinstance(error, SessionBusy):
        what = str(error).partition(";")[0].rstrip(".")  # the rest advises to end the other program
        return APIError(409, f"{what}; retry in a moment.", "session_in_use", headers={"Retry-After": "1"})
    for kind, status, code, field, sentence in _KINDS:
        if isinstance(error, kind):
            return APIError(status, sentence or str(error), code, field)
    return APIError(500, f"The request failed with an internal error ({type(error).__name__}).", FAILED)


@contextmanager
def naming_field(field: str) -> Iterator[None]:
    """Convert a UsageError of the block to an APIError that names the request's field."""
    try:
        yield
    except UsageError as error:
        found = api_error(error)
        raise APIError(found.status_code, found.detail, found.code, field) from error


async def _handle(request: Request, error: Exception) -> JSONResponse:
    """Return the response for an exception of a route."""
    found: APIError = request.app.state.metrics.rejected(error)
    return found.response(request.url.path)


HANDLERS: dict[Any, Any] = dict.fromkeys((RequestValidationError, AnyHTTPException, KvkeepError), _handle)

# -- a field ----------------------------------------------------------------------------------------------

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


def validation_error(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """Return the client's error for pydantic's errors of a request."""
    # A field of several types has an error for each; the deepest one is of the intended type.
    found = [(_place(one["loc"]), one) for one in errors]
    place, first = max(found, key=lambda one: (len(one[0]), one[1]["type"] not in _EXPECTED))
    if not place and first["type"] in _OBJECTS:
        return APIError(400, "The request body has to be a JSON object.", "invalid_json")
    field = ".".join(place) or None
    expected = dict.fromkeys(_EXPECTED.get(one["type"]) for where, one in found if where == place)
    if None not in expected:
        reason = f"has to be {' or '.join(map(str, expected))}"
    elif first["type"] in _REASONS:
        reason = _REASONS[first["type"]].format(**first.get("ctx", {}))
    else:
        reason = f"is wrong: {first['msg'][:1].lower()}{first['msg'][1:]}"
    name = "The request body" if field is None else f"'{field}'"
    return APIError(400, f"{name} {reason}.", "invalid_value", field)


def _place(where: Sequence[Any]) -> list[str]:
    """Return the path to a field: names and numbers, without the names of types."""
    return [str(one) for one in where if not isinstance(one, str) or not (one in _TYPES or "[" in one or "-" in one)]
