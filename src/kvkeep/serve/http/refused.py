"""A request that is refused, as OpenAI's clients read it: one object, one status, one sentence."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

AGAIN_S = 5
"""Seconds after which a client may ask again."""


def new_id() -> str:
    """Return an id for a request, which its answer has as ``x-request-id``."""
    return f"req-{secrets.token_hex(8)}"


class Refused(HTTPException):
    """A request is refused. code: as OpenAI names it. param: the field that is wrong. headers: of the response."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, {**(headers or {})})
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
        headers = ({"Retry-After": str(AGAIN_S)} if self.status_code in (429, 503) else {}) | {**(self.headers or {})}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status_code == 401 else {}
        return JSONResponse(self.body(), self.status_code, headers)
