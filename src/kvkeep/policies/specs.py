"""Names with parameters, as people write them: ``quantize:4``, ``snapkv:window=16,kernel=5``."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar

from kvkeep.errors import UsageError, unknown

T = TypeVar("T")


def build(kind: str, text: str, registry: Mapping[str, type[T]], *, files: bool = True) -> T:
    """Return the dataclass that ``text`` names in ``registry``, with the parameters given after a colon. files: whether
    parameters that name files are allowed.

    A first value without a name is the first parameter's. A class with ``from_spec`` parses its parameters itself.
    Raises UsageError, which names the alternatives.
    """
    name, _, rest = text.partition(":")
    if name not in registry:
        raise unknown(kind, name, list(registry))
    made = registry[name]
    names = [field.name for field in fields(made)]  # type: ignore[arg-type]
    if (from_spec := getattr(made, "from_spec", None)) is not None:
        read: T = from_spec(rest)
        if not files:
            _check_files(name, made, [one for one in names if getattr(read, one)])
        return read
    types = _types(typing.cast(Any, made))
    given: dict[str, Any] = {}
    for number, part in enumerate(part for part in rest.split(",") if part):
        key, equals, value = part.partition("=")
        if not equals and number == 0 and names:
            key, value = names[0], rest if "=" not in rest and len(names) == 1 else part
        if key not in names:
            takes = f"takes {', '.join(names)}" if names else "takes no parameters"
            raise UsageError(f"'{text}' is not understood: {kind} '{name}' {takes}.")
        if not files:
            _check_files(name, made, [key])
        try:
            given[key] = types[key](value)
            if types[key] is float and not math.isfinite(given[key]):
                raise ValueError
        except ValueError:
            raise UsageError(f"'{text}' is not understood: {key} is a {_WORDS[types[key]]}, not '{value}'.") from None
    if missing := [name for name in required(made) if name not in given]:
        raise UsageError(f"'{text}' is not understood: {kind} '{name}' needs {', '.join(missing)}.")
    return made(**given)


def parameters(made: type[Any]) -> dict[str, Any]:
    """Return the parameters of a selector, fate or recall with their defaults, MISSING where one has none."""
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(made)
    }


def required(made: type[Any]) -> list[str]:
    """Return the parameters that have no default."""
    return [name for name, default in parameters(made).items() if default is MISSING]


@cache
def _types(made: type[Any]) -> dict[str, Any]:
    """Return the type of each parameter. Annotations are text, which would be compiled at each call."""
    return typing.get_type_hints(made)


def _check_files(name: str, made: Any, given: Sequence[str]) -> None:
    """Raise UsageError for a parameter that names a file."""
    for key in given:
        if key in made.files:
            raise UsageError(
                f"The '{key}' of '{name}' may name a file on the server, so only 'kvkeep serve -x' takes it; "
                "leave it out of the request."
            )


_WORDS = {int: "whole number", float: "number", str: "text"}
