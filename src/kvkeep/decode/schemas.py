"""JSON Schemas of arguments that are written as they are, and not as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "boolean": bool, "integer": int, "number": (int, float), "null": type(None), "array": list,
    "object": dict,
}  # fmt: skip
_STEPS = 32
"""References that follow each other: more are a cycle."""


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema, or the one that it refers to within ``root``. A reference that leads nowhere is returned."""
    found = schema
    for _ in range(_STEPS):
        if not isinstance(found, Mapping) or not isinstance(found.get("$ref"), str):
            return found
        place: Any = root
        for step in found["$ref"].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            place = place.get(name) if isinstance(place, Mapping) else None
        if place is None or not found["$ref"].startswith("#"):
            return found
        found = place
    return found


def branches(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[Any]:
    """Return schemas of one kind each, one of which a value obeys: those of unions, of lists of types and of enums."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _STEPS:
        return [schema]
    if "const" in schema:
        return [{"const": schema["const"]}]
    if isinstance(schema.get("enum"), list):
        return [{"const": one} for one in schema["enum"]]
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list):
            return [one for part in schema[union] for one in branches(part, root, depth + 1)]
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": one} for one in schema["type"]]
    return [schema]


def is_text(schema: Any) -> bool:
    """Return whether a value of one of :func:`branches` is a text. One of any type is written as a text, too."""
    if not isinstance(schema, Mapping):
        return schema is True
    if "const" in schema:
        return isinstance(schema["const"], str)
    return schema.get("type", "string") == "string" and "allOf" not in schema and "$ref" not in schema


def admits(schema: Any, value: Any) -> bool:
    """Return whether a value is of the type of one of :func:`branches`, or one of any type."""
    if not isinstance(schema, Mapping):
        return True
    if "const" in schema:
        return bool(schema["const"] == value) and isinstance(schema["const"], bool) is isinstance(value, bool)
    known = _TYPES.get(schema.get("type", ""), object)
    return isinstance(value, known) and (known is bool or known is object or not isinstance(value, bool))
