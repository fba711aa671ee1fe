"""Partial results of measurements that end early."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvkeep.errors import KvkeepError, UsageError
from kvkeep.plugins import first_line

INTERRUPTED = "interrupted before it was measured"
"""Error of a row without figures because of an interruption."""


def reason(error: Exception) -> str:
    """Return the sentence about ``error`` in a row without figures. The error is a refusal, or a fault of one method,
    which may be a plugin's. The other rows are measured nevertheless."""
    return str(error) if isinstance(error, KvkeepError) else f"{first_line(error)}."


class Interruption(KeyboardInterrupt):
    """Ctrl-C during a measurement. ``found``: the partial results."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


class Ending(UsageError):
    """A refusal during a measurement. ``found``: the partial results."""

    def __init__(self, reason: str, found: Any) -> None:
        super().__init__(reason)
        self.found = found


@contextmanager
def keeping(found: Any, rows: Sequence[Any]) -> Iterator[None]:
    """Attach ``found`` to an interruption or a refusal within the block, if ``rows`` is not empty at that time."""
    try:
        yield
    except KeyboardInterrupt:
        raise (Interruption(found) if rows else KeyboardInterrupt) from None
    except UsageError as error:
        raise (Ending(str(error), found) if rows else error) from None
