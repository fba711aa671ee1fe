"""The error of a request in the form of OpenAI's clients: one object, one status, one sentence."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

RETRY_AFTER_S = 5
"""``Retry-After`` of 429 and 503."""
CLOSE = {"Connection": "close"}
"""The header of a response after which the server closes the connection."""
MAX_SENTENCE, MAX_PARAM = 1000, 200
"""Characters of an error's sentence and field; they may quote what the client sent."""


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

    def response(self) -> JSONResponse:
        """Return the error as an HTTP response."""
        retry = self.status_code in (429, 503)
        headers = ({"Retry-After": str(RETRY_AFTER_S)} if retry else {}) | {**(self.headers or {})}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status_code == 401 else {}
        return JSONResponse(self.body(), self.status_code, headers)
