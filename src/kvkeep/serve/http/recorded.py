"""Recorded requests: the prompt of a request's body in a file, as the server reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvkeep.errors import UsageError
from kvkeep.serve.http.completions import ChatRequest, TextRequest
from kvkeep.serve.http.errors import APIError, api_error
from kvkeep.serve.http.messages import MessagesRequest
from kvkeep.serve.http.protocol import AnswerRequest, Prompt
from kvkeep.serve.http.responses import ResponseRequest


def _protocol(body: Mapping[str, Any]) -> type[AnswerRequest] | None:
    """Return the kind of a request, by fields that only it has."""
    if "messages" in body:
        tools = body.get("tools") or [{}]
        anthropic = "system" in body or (isinstance(tools, list) and isinstance(tools[0], dict) and "name" in tools[0])
        return MessagesRequest if anthropic else ChatRequest
    return ResponseRequest if "input" in body else TextRequest if "prompt" in body else None


def recorded_prompt(text: str, name: str) -> Prompt:
    """Return the prompt of the request whose body is ``text``, JSON. name: that of its file. Raises UsageError if it is
    no request that the server would answer."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"The request '{name}' is not valid JSON; give the body of a request.") from error
    schema = _protocol(body) if isinstance(body, dict) else None
    if schema is None:
        fields = "'messages', 'input' or 'prompt'"
        raise UsageError(f"The request '{name}' has no {fields}; give the body of a request for an answer.")
    try:
        return schema.model_validate(body).given()
    except (ValidationError, APIError) as error:
        raise UsageError(f"The server would refuse the request '{name}': {api_error(error).detail}") from error
