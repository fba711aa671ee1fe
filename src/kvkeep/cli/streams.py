"""Standard streams as a program may find them: closed, of another encoding, full, or gone."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

from kvkeep.errors import KvkeepError


class Watched(io.TextIOWrapper):
    """A text stream that remembers why it could not be written to. (A buffer may have dropped what it was given, so
    that to ask again is no help.)"""

    refusal: OSError | None = None

    def write(self, text: str) -> int:
        """Write ``text``."""
        try:
            return super().write(text)
        except OSError as error:
            self.refusal = error
            raise

    def flush(self) -> None:
        """Write out what waits."""
        try:
            super().flush()
        except OSError as error:
            self.refusal = error
            raise


def prepare() -> None:
    """Make standard streams safe to use: characters that their encoding does not have are written as escapes, and what
    is closed goes nowhere. Raises KvkeepError where standard output is closed."""
    _fill()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    if sys.stdout is None:
        raise KvkeepError("Standard output is closed, so there is nowhere to write to; redirect it to a file.")
    if type(sys.stdout) is io.TextIOWrapper:
        sys.stdout.flush()
        sys.stdout = Watched(
            sys.stdout.buffer, sys.stdout.encoding, "backslashreplace", line_buffering=sys.stdout.line_buffering
        )


def _fill() -> None:
    """Open what is closed of the first three files, so that no other file gets their number and is written to."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)


def undelivered() -> OSError | None:
    """Return why something could not be written to standard output, None where all of it was. What waits is dropped
    then, so that Python does not try again when it ends."""
    with suppress(OSError):
        sys.stdout.flush()
    refusal: OSError | None = getattr(sys.stdout, "refusal", None)
    if refusal is not None:
        drop(sys.stdout)
    return refusal


def drop(stream: object) -> None:
    """Let everything that is written to ``stream`` from now on go nowhere, and what waits with it."""
    with suppress(OSError, AttributeError):
        handle = os.open(os.devnull, os.O_WRONLY)
        os.dup2(handle, stream.fileno())  # type: ignore[attr-defined]
        os.close(handle)
