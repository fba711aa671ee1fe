"""Standard streams that are closed, full, or unable to encode a character."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

from kvkeep.errors import KvkeepError, reason_of


class _Stream(io.TextIOWrapper):
    """A text stream whose failed writes :meth:`failed` handles; everything after that goes to ``os.devnull``."""

    def write(self, text: str) -> int:
        """Write ``text``."""
        try:
            return super().write(text)
        except OSError as error:
            self.failed(error)
            return len(text)

    def flush(self) -> None:
        """Write out the buffer."""
        try:
            super().flush()
        except OSError as error:
            self.failed(error)

    def failed(self, error: OSError) -> None:
        """Go on without the stream."""
        discard(self)


class OutputStream(_Stream):
    """Standard output: a write that fails ends the command."""

    def failed(self, error: OSError) -> None:
        """Raise KvkeepError, or BrokenPipeError where nobody reads."""
        discard(self)  # or Python would flush its buffer at exit
        if isinstance(error, BrokenPipeError):
            raise error
        raise KvkeepError(f"Writing to standard output failed: {reason_of(error)}.") from error


def prepare() -> None:
    """Make the standard streams safe. They escape characters outside their encoding, and a standard error that cannot
    be written to becomes ``os.devnull``. Raises KvkeepError if standard output is closed."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:  # no other file gets the number of a closed one
        os.set_inheritable(handle, True)
    os.close(handle)
    for name, kind in (("stderr", _Stream), ("stdout", OutputStream)):
        stream = getattr(sys, name)
        if stream is None and name == "stdout":
            raise KvkeepError("Standard output is closed, so there is nowhere to write to; redirect it to a file.")
        if stream is None:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
        elif type(stream) is io.TextIOWrapper:
            stream.flush()
            lines = name == "stderr" or stream.line_buffering
            setattr(sys, name, kind(stream.buffer, stream.encoding, "backslashreplace", line_buffering=lines))


def discard(stream: object) -> None:
    """Redirect ``stream`` and its buffer to ``os.devnull``."""
    with suppress(OSError, AttributeError):
        handle = os.open(os.devnull, os.O_WRONLY)
        os.dup2(handle, stream.fileno())  # type: ignore[attr-defined]
        os.close(handle)
