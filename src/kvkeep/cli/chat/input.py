"""Questions from standard input, one per line; :mod:`~kvkeep.cli.chat.prompt` reads those of a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import IO

from kvkeep.decode.prompt import standard_input
from kvkeep.errors import UsageError

Ask = Callable[[], str]
"""Returns the next question, stripped. Raises EOFError after the last, KeyboardInterrupt for Ctrl-C, and UsageError for
one that is not UTF-8."""
LINE = "that line"


def is_interactive() -> bool:
    """Return whether questions come from a terminal. Raises UsageError if standard input is closed."""
    standard_input()
    return sys.stdin.isatty()


def lines() -> Ask:
    """Return a function that returns the lines of standard input. Raises UsageError if it is closed."""
    source = standard_input()
    return lambda: _line(source)


def _line(source: IO[bytes]) -> str:
    line = source.readline()
    if not line:
        raise EOFError
    try:
        return line.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise UsageError(f"The text of {LINE} is not UTF-8; the line is ignored.") from None
