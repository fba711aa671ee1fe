"""Standard streams that are closed, full, or unable to encode a character."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

from kvkeep.errors import KvkeepError


class OutputStream(io.TextIOWrapper):
    """A text stream that remembers the error of a failed write, because a later flush may succeed without the data."""

    error: OSError | None = None

    def write(self, text: str) -> int:
        """Write ``text``."""
        try:
            return super().write(text)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Write out the buffer."""
        try:
            super().flush()
        except OSError as error:
            self.error = error
            raise


class ErrorStream(io.TextIOWrapper):
    """A text stream that becomes ``os.devnull`` when a write fails."""

    def write(self, text: str) -> int:
        """Write ``text``."""
        try:
            return super().write(text)
        except OSError:
            discard(self)
            return len(text)

    def flush(self) -> None:
        """Write out the buffer."""
        try:
            super().flush()
        except OSError:
            discard(self)


def prepare() -> None:
    """Make the standard streams safe. They escape characters outside their encoding, and a closed standard error
    becomes ``os.devnull``. Raises KvkeepError if standard output is closed."""
    _open_closed()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    if type(sys.stderr) is io.TextIOWrapper:
        sys.stderr.flush()
        sys.stderr = ErrorStream(sys.stderr.buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True)
    if sys.stdout is None:
        raise KvkeepError("Standard output is closed, so there is nowhere to write to; redirect it to a file.")
    if type(sys.stdout) is io.TextIOWrapper:
        sys.stdout.flush()
        sys.stdout = OutputStream(
            sys.stdout.buffer, sys.stdout.encoding, "backslashreplace", line_buffering=sys.stdout.line_buffering
        )


def _open_closed() -> None:
    """Open ``os.devnull`` for closed descriptors 0 to 2, so that no other file gets their numbers."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)


def output_error() -> OSError | None:
    """Return the error of a failed write to standard output. In that case discard its buffer, so that Python does not
    flush it at exit."""
    with suppress(OSError):
        sys.stdout.flush()
    error: OSError | None = getattr(sys.stdout, "error", None)
    if error is not None:
        discard(sys.stdout)
    return error


def discard(stream: object) -> None:
    """Redirect ``stream`` and its buffer to ``os.devnull``."""
    with suppress(OSError, AttributeError):
        handle = os.open(os.devnull, os.O_WRONLY)
        os.dup2(handle, stream.fileno())  # type: ignore[attr-defined]
        os.close(handle)
