"""The keys of a GGUF file, and which of them were read: one that was not read is harmless, or the file is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvkeep.errors import ModelError

T = TypeVar("T", bool, int, float, str, list)
_SHOWN = 60
"""Characters of a value in a message."""
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}


class FileKeys:
    """Values of a file's metadata by key. Reading a key notes it."""

    def __init__(self, file: Path, metadata: Mapping[str, Any]) -> None:
        self.file, self.metadata = file, metadata
        self.read: set[str] = set()
        """The keys that were read."""

    def __contains__(self, key: str) -> bool:
        return key in self.metadata

    def get(self, key: str, kind: type[T], default: T | None = None) -> Any:
        """Return the value of ``key``, or ``default`` if the file does not have it. Numbers in arrays become a list.
        Raises ModelError for a value of another type."""
        self.read.add(key)
        if key not in self.metadata:
            return default
        value = self.metadata[key]
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(f"'{self.file}' is damaged: its {key} is {str(value)[:40]!r}, not {_NAMES[kind]}.")
        return value

    def need(self, key: str, kind: type[T]) -> Any:
        """Return the value of ``key``. Raises ModelError if the file does not have it, or has another type."""
        if key not in self.metadata:
            raise ModelError(f"'{self.file}' cannot be read as a model: it does not state {key}.")
        return self.get(key, kind)

    def items(self, key: str, kind: type[T], default: list[T] | None = None) -> Any:
        """Return the items of a list, all of one type. Raises ModelError for another value."""
        value = self.metadata.get(key)
        kinds = {"b": bool, "i": int, "u": int, "f": float}
        stored = kinds.get(value.dtype.kind) if isinstance(value, np.ndarray) else str
        found = self.get(key, list, default)
        if value is not None and found and stored is not kind and not (kind is float and stored is int):
            raise ModelError(f"'{self.file}' is damaged: its {key} is a list of others than {_NAMES[kind]}.")
        return found

    def several(self, key: str, count: int, kind: type[T], default: T | None = None) -> list[Any]:
        """Return ``count`` values of ``key``, one for each layer; a single value counts for all."""
        if isinstance(self.metadata.get(key), list | np.ndarray):
            values = self.items(key, kind)
            if len(values) != count:
                raise ModelError(f"'{self.file}' is damaged: its {key} has {len(values)} values, not {count}.")
            return list(values)
        return [self.get(key, kind, default)] * count

    def starting(self, prefix: str) -> list[str]:
        """Return the file's keys that start with ``prefix``."""
        return [key for key in self.metadata if key.startswith(prefix)]

    @property
    def unread(self) -> list[str]:
        """The file's keys that nothing has read."""
        return [key for key in self.metadata if key not in self.read]

    def shown(self, key: str) -> str:
        """Return the value of ``key`` for a message, shortened, without noting that it was read."""
        value = self.metadata[key]
        if isinstance(value, list | np.ndarray):
            return f"a list of {len(value)}"
        text = repr(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
