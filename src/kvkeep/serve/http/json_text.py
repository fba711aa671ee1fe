"""JSON of replies of any size, made in a worker thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from fastapi.responses import Response

_SLICE = 256
"""Elements that are written in one call, which holds the interpreter's lock."""
_dumped = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_text(value: Any) -> str:
    """Return a value as JSON. Between two slices of a long list, other threads run."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_dumped(name)}:{json_text(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list) and len(value) > _SLICE:
        slices = (value[first : first + _SLICE] for first in range(0, len(value), _SLICE))
        return "[" + ",".join(_dumped(one)[1:-1] for one in slices) + "]"
    return _dumped(value)


async def json_response(make: Callable[..., Mapping[str, Any]], *given: Any) -> Response:
    """Return what ``make`` returns as a response. Both it and the JSON are made in a worker thread."""
    text = await asyncio.to_thread(lambda: json_text(make(*given)).encode())
    return Response(text, media_type="application/json")
