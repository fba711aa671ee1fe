"""Standard streams that are closed, full, or of another encoding."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

from kvkeep.errors import KvkeepError


class Watched(io.TextIOWrapper):
    """A text stream that keeps the error of a failed write: a buffer may drop its data, and the next flush would
    succeed."""

    refusal: OSError | None = None

    def write(self, text: str) -> int:
        """Write ``text``."""
        try:
            return super().write(text)
        except OSError as error:
            self.refusal = error
            raise

    def flush(self) -> None:
        """Write out the buffer."""
        try:
            super().flush()
        except OSError as error:
            self.refusal = error
            raise


class Unheard(io.TextIOWrapper):
    """A text stream that nobody has to read: where it cannot be written to, it is ``os.devnull`` from then on."""

    def write(self, text: str) -> int:
        """Write ``text``."""
        try:
            return super().write(text)
        except OSError:
            drop(self)
            return len(text)

    def flush(self) -> None:
        """Write out the buffer."""
        try:
            super().flush()
        except OSError:
            drop(self)


def prepare() -> None:
    """Make standard streams safe: characters outside their encoding are escaped, and a standard error that is closed,
    or closes, is ``os.devnull``. Raises KvkeepError where standard output is closed."""
    _fill()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    if type(sys.stderr) is io.TextIOWrapper:
        sys.stderr.flush()
        sys.stderr = Unheard(sys.stderr.buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True)
    if sys.stdout is None:
        raise KvkeepError("Standard output is closed, so there is nowhere to write to; redirect it to a file.")
    if type(sys.stdout) is io.TextIOWrapper:
        sys.stdout.flush()
        sys.stdout = Watched(
            sys.stdout.buffer, sys.stdout.encoding, "backslashreplace", line_buffering=sys.stdout.line_buffering
        )


def _fill() -> None:
    """Open closed descriptors 0 to 2 on ``os.devnull``, so that no other file gets their numbers."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)


def undelivered() -> OSError | None:
    """Return the error of a failed write to standard output, else None. After an error the buffer is dropped, so that
    Python does not flush it at exit."""
    with suppress(OSError):
        sys.stdout.flush()
    refusal: OSError | None = getattr(sys.stdout, "refusal", None)
    if refusal is not None:
        drop(sys.stdout)
    return refusal


def drop(stream: object) -> None:
    """Send ``stream`` and its buffer to ``os.devnull``."""
    with suppress(OSError, AttributeError):
        handle = os.open(os.devnull, os.O_WRONLY)
        os.dup2(handle, stream.fileno())  # type: ignore[attr-defined]
        os.close(handle)
