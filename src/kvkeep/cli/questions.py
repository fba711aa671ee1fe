"""Questions: the input of ``kvkeep chat``, a terminal or a file of lines.

A terminal by itself gives a line at a time, at most 4,095 bytes of it, and makes several questions of a pasted
text; prompt_toolkit makes pasted text one question and has no limit of length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from kvkeep.decode.prompt import check_text, standard_input
from kvkeep.errors import UsageError

Ask = Callable[[], str]
"""Returns the next question, its ends stripped. Raises EOFError after the last, KeyboardInterrupt for Ctrl-C, and
UsageError for one that is not UTF-8."""

_NAME = "that line"


@contextmanager
def questions() -> Iterator[Ask]:
    """Yield a function that returns the next question. Raises UsageError where standard input is closed."""
    source = standard_input()
    if not sys.stdin.isatty():
        yield lambda: _line(source)
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(
        FormattedText([("bold", "> ")]), output=create_output(always_prefer_tty=True)
    )
    yield lambda: check_text(session.prompt(handle_sigint=False).strip(), _NAME)


def _line(source: IO[bytes]) -> str:
    line = source.readline()
    if not line:
        raise EOFError
    try:
        return line.decode().strip()
    except UnicodeDecodeError:
        raise UsageError(f"The text of {_NAME} is not UTF-8; it is left out.") from None
