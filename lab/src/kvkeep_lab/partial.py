"""Measurements that end early keep the results so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvkeep.errors import KvkeepError, UsageError
from kvkeep.plugins import first_line

INTERRUPTED = "interrupted before it was measured"
"""What is said of a row that an interruption left without figures."""


def reason(error: Exception) -> str:
    """Return what a row says of the error that left it without figures: a refusal, or a fault of one method, perhaps of
    another package, which leaves the others their rows."""
    return str(error) if isinstance(error, KvkeepError) else f"{first_line(error)}."


class Interruption(KeyboardInterrupt):
    """Ctrl-C in the middle of a measurement; ``found``: what was measured until then."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


class Ending(UsageError):
    """A refusal in the middle of a measurement; ``found``: what was measured until then."""

    def __init__(self, reason: str, found: Any) -> None:
        super().__init__(reason)
        self.found = found


@contextmanager
def keeping(found: Any, rows: Sequence[Any]) -> Iterator[None]:
    """Within the block, let an interruption or a refusal carry ``found``, if it has ``rows`` by then."""
    try:
        yield
    except KeyboardInterrupt:
        raise (Interruption(found) if rows else KeyboardInterrupt) from None
    except UsageError as error:
        raise (Ending(str(error), found) if rows else error) from None
