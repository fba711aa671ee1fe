"""The JSON of a body: how many objects, lists, fields and strings it may have, and how it is read.

Python's parser holds the interpreter's lock until it has read the whole text, and a small value takes a hundred times
its bytes. So the structure is counted before it is read.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from kvkeep.serve.http.errors import APIError

MAX_CONTAINERS = 120_000
"""Objects and lists."""
MAX_NAMES = 160_000
"""Fields of all objects."""
MAX_VALUES = 1_200_000
"""Values that a comma separates: elements of all lists, and fields of all objects."""
MAX_STRINGS = 400_000
"""Strings, names included."""
SMALL_BYTES = 200_000
"""Bytes of a body that is read without counting: it is too short to have many more parts than allowed."""

_LIMITS = (
    ("objects and lists", rb"[{", MAX_CONTAINERS),
    ("fields", rb":", MAX_NAMES),
    ("values", rb",", MAX_VALUES),
)


def read_json(body: bytes) -> Any:
    """Return the value of a JSON text in UTF-8. Raises APIError for any other text, and for one with too many parts."""
    if len(body) > SMALL_BYTES:
        _check(body)
    with suppress(ValueError, RecursionError):  # no JSON, numbers of thousands of digits, nested too deeply
        return json.loads(body.decode("utf-8-sig"))
    raise APIError(400, "The request body is not valid JSON.", "invalid_json")  # without a cause, which keeps the text


def _check(body: bytes) -> None:
    quotes = ("strings", b'"', 2 * MAX_STRINGS)
    if not any(_count(body, signs) > limit for _, signs, limit in (*_LIMITS, quotes)):  # also of signs within strings
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in body else body
    if unescaped.count(b'"') > 2 * MAX_STRINGS:
        raise _too_many("strings", MAX_STRINGS)
    outside = b"".join(unescaped.split(b'"')[::2])
    for what, signs, limit in _LIMITS:
        if _count(outside, signs) > limit:
            raise _too_many(what, limit)


def _count(text: bytes, signs: bytes) -> int:
    return sum(text.count(bytes([sign])) for sign in signs)


def _too_many(what: str, limit: int) -> APIError:
    sentence = f"The request body has more than {limit:,} {what}; send fewer messages, parts or list elements."
    return APIError(400, sentence, "too_complex")
