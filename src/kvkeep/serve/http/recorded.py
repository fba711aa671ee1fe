"""Recorded requests: the prompt of a request's body in a file, as the server reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import ValidationError

from kvkeep.errors import UsageError
from kvkeep.serve.http.completions import ChatRequest, TextRequest
from kvkeep.serve.http.errors import validation_error
from kvkeep.serve.http.protocol import AnswerRequest, Prompt

PROTOCOLS: Mapping[str, type[AnswerRequest]] = {"messages": ChatRequest, "prompt": TextRequest}
"""Requests by a field that only they have."""


def recorded_prompt(text: str, name: str) -> Prompt:
    """Return the prompt of the request whose body is ``text``, JSON. name: that of its file. Raises UsageError if it is
    no request that the server would answer."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"The request '{name}' is not valid JSON; give the body of a request.") from error
    schema = next((kind for field, kind in PROTOCOLS.items() if isinstance(body, dict) and field in body), None)
    if schema is None:
        fields = " or ".join(f"'{one}'" for one in PROTOCOLS)
        raise UsageError(f"The request '{name}' has no {fields}; give the body of a request for an answer.")
    try:
        return schema.model_validate(body).given()
    except ValidationError as error:
        found = validation_error(error.errors(include_url=False, include_input=False))
        raise UsageError(f"The server would refuse the request '{name}': {found.detail}") from error
