"""A program on a terminal of its own, as a person sees it: typed to, read from, closed."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked import kvkeep, started

MAIN = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from kvkeep.cli import main; main()"
"""A program for an interpreter of its own."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """``kvkeep`` with ``arguments`` on a pseudo-terminal so many ``columns`` wide; ``stdout``: to a file instead;
    ``program``: what an interpreter of its own runs; ``within``: what calls it, in the same process."""

    def __init__(
        self,
        *arguments: str,
        columns: int = 80,
        stdout: Path | None = None,
        program: str = "",
        within: Callable[[Callable[[], None]], None] = lambda run: run(),
    ) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "CI")}
        output: Any = slave if stdout is None else stdout.open("wb")
        environment |= {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
        given: dict[str, Any] = {"stdin": slave, "stdout": output, "stderr": slave, "start_new_session": True}

        def controlled() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            within(kvkeep(*arguments))

        if program:
            self.process = subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment, **given)
        else:
            self.process = started(controlled, environment, **given)
        os.close(slave)
        if stdout is not None:
            output.close()
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def type(self, text: str) -> None:
        """Type ``text``, as fast as the terminal takes it."""
        data = text.encode(errors="surrogateescape")
        while data:
            _, ready, _ = select.select([], [self.master], [], 30)
            assert ready, f"nobody reads what is typed: {self.seen}"
            data = data[os.write(self.master, data[:512]) :]
            self._read(0)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # the program has closed it
            data = b""
        self.seen += data.decode(errors="replace")
        if b"\x1b[6n" in data:  # it asks where the cursor is
            os.write(self.master, b"\x1b[1;1R")
        return bool(data)

    def asked(self, times: int = 1) -> None:
        """Read until so many questions have been asked for: what is pasted from then on is marked."""
        self.until("\x1b[?2004h", times)

    def until(self, text: str, times: int = 1, seconds: float = 120) -> str:
        """Read until ``text`` was shown so many ``times``; return all that was shown so far."""
        end = time.monotonic() + seconds
        while self.seen.count(text) < times:
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
            assert self._read(0.5) or self.seen.count(text) >= times, f"no {text!r} in {self.seen!r}"
        return self.seen

    def ended(self, seconds: float = 60) -> int:
        """Read until the program leaves; return its exit code."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it goes on: {self.seen!r}"
            self._read(0.1)
        while self._read(0.1) and select.select([self.master], [], [], 0.1)[0]:
            pass
        return self.process.returncode

    def close(self) -> None:
        """Close the terminal's window."""
        if self.master >= 0:
            os.close(self.master)
            self.master = -1

    @property
    def text(self) -> str:
        """What was shown, without what moves the cursor."""
        return _CONTROL.sub("", self.seen).replace("\r\n", "\n")
