"""Questions: where ``kvkeep chat`` reads them from, a terminal or a file of lines.

A terminal's own line editing hands over a line at a time, at most 4,095 bytes of it, and so makes several questions of
a pasted text. So the terminal is read character by character, and asked to say where what is pasted begins and ends
(bracketed paste): what is pasted is one question, and a line may be as long as it likes.
"""

from __future__ import annotations

import codecs
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from rich.cells import cell_len

from kvkeep.decode.prompt import check_text, standard_input
from kvkeep.errors import UsageError

Ask = Callable[[], str]
"""Returns the next question, its ends stripped. Raises EOFError after the last, KeyboardInterrupt for Ctrl-C, and
UsageError for one that is not UTF-8."""

_PROMPT = "> "
_BLOCK = 1 << 16
_NAME = "that line"


@contextmanager
def questions() -> Iterator[Ask]:
    """Yield what asks for the next question. Raises UsageError where standard input is closed."""
    source = standard_input()
    if not sys.stdin.isatty():
        yield lambda: _line(source)
    elif sys.platform == "win32":  # whose consoles have neither limit
        yield lambda: input(_PROMPT).strip()
    else:
        with Terminal(sys.stdin.fileno()) as terminal:
            yield terminal.ask


def _line(source: IO[bytes]) -> str:
    line = source.readline()
    if not line:
        raise EOFError
    try:
        return line.decode().strip()
    except UnicodeDecodeError:
        raise UsageError(f"The text of {_NAME} is not UTF-8; it is left out.") from None


class Terminal:
    """A terminal that is read character by character. Keys: Enter sends; Backspace, Ctrl-W and Ctrl-U take back a
    character, a word, everything; Ctrl-D on an empty line ends."""

    def __init__(self, handle: int) -> None:
        import fcntl
        import termios

        self._termios: Any = termios
        self._handle = handle
        writable = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        self._screen = handle if writable else sys.stderr.fileno()  # as the terminal's own echo: whatever is redirected
        self._plain = os.environ.get("TERM", "dumb") == "dumb"
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._waiting = ""  # typed already, and not part of a question yet
        self._text = ""

    def __enter__(self) -> Terminal:
        self._before = self._termios.tcgetattr(self._handle)
        self._continued = signal.signal(signal.SIGCONT, lambda *_: self._set())
        self._set()
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGCONT, self._continued)
        with suppress(OSError, self._termios.error):  # it may be gone
            if not self._plain:
                self._write("\x1b[?2004l")
            self._termios.tcsetattr(self._handle, self._termios.TCSADRAIN, self._before)

    def _set(self) -> None:
        """Have every character at once and without an echo, and the signals of Ctrl-C and Ctrl-Z as ever."""
        termios = self._termios
        mode = [*self._before[:6], [*self._before[6]]]
        mode[0] &= ~(termios.ICRNL | termios.INLCR | termios.ISTRIP)
        mode[3] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        with suppress(OSError, termios.error):
            termios.tcsetattr(self._handle, termios.TCSADRAIN, mode)
            if not self._plain:
                self._write("\x1b[?2004h")

    def ask(self) -> str:
        """Return the next question."""
        self._text = ""
        self._write(self._prompt())
        try:
            while not self._take():
                data = os.read(self._handle, _BLOCK)
                if not data:
                    raise EOFError
                self._waiting += self._decoder.decode(data)
        except KeyboardInterrupt:
            self._waiting = ""
            self._write("\n")
            raise
        except OSError as error:  # the terminal is gone
            raise EOFError from error
        self._write("\n")
        return check_text(self._text.strip(), _NAME)

    # -- keys ---------------------------------------------------------------------------------------

    def _take(self) -> bool:
        """Take what was typed into the text; return whether it was sent, with the rest left for the next."""
        while self._waiting:
            if self._waiting[0] == "\x1b":
                if not self._escape():
                    return False
                continue
            if (count := _plain(self._waiting)) > 0:
                self._add(self._waiting[:count])
                self._waiting = self._waiting[count:]
                continue
            key, self._waiting = self._waiting[0], self._waiting[1:]
            if key in "\r\n":
                return True
            if key == "\x04" and not self._text:
                raise EOFError
            if key == "\t":
                self._add(key)
            elif key in "\x7f\x08":
                self._keep(self._text[:-1])
            elif key == "\x15":
                self._keep("")
            elif key == "\x17":
                kept = self._text.rstrip()
                self._keep(kept[: len(kept) - len(kept.split()[-1])] if kept else "")
        return False

    def _escape(self) -> bool:
        """Take a key's sequence, which says nothing here, or all of a pasted text; return whether it is there whole."""
        begin, end = "\x1b[200~", "\x1b[201~"
        waiting = self._waiting
        if waiting.startswith(begin):
            stop = waiting.find(end)
            if stop < 0:
                return False
            self._add(_pasted(waiting[len(begin) : stop]))
            self._waiting = waiting[stop + len(end) :]
            return True
        if len(waiting) == 1:
            return False
        if waiting[1] not in "[O":  # the key Esc, or one with Alt
            self._waiting = waiting[1:]
            return True
        final = next((place for place in range(2, len(waiting)) if "@" <= waiting[place] <= "~"), None)
        if final is None:
            return False
        self._waiting = waiting[final + 1 :]
        return True

    # -- what is seen -------------------------------------------------------------------------------

    def _add(self, text: str) -> None:
        self._text += text
        self._write(_seen(text))

    def _keep(self, text: str) -> None:
        """Show a shorter text instead of what is there."""
        gone = self._text[len(text) :]
        if not gone:
            return
        if self._plain:
            self._write("\b \b" * cell_len(_seen(gone)))
        else:
            rows = self._rows(_PROMPT + _seen(self._text))
            self._write((f"\x1b[{rows}A" if rows else "") + "\r\x1b[J" + self._prompt() + _seen(text))
        self._text = text

    def _rows(self, text: str) -> int:
        """Return how many rows below the first the end of ``text`` is."""
        try:
            width = os.get_terminal_size(self._screen).columns or 80
        except OSError:
            width = 80
        rows = column = 0
        for character in text:
            size = cell_len(character)
            if character == "\n" or column + size > width:
                rows, column = rows + 1, 0
            column += 0 if character == "\n" else size
        return rows

    def _prompt(self) -> str:
        return _PROMPT if self._plain else f"\x1b[1m{_PROMPT}\x1b[0m"

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        with suppress(OSError):
            while data:
                data = data[os.write(self._screen, data) :]


def _plain(text: str) -> int:
    """Return how many of the first characters stand for themselves."""
    return next((place for place, character in enumerate(text) if _is_control(character)), len(text))


def _pasted(text: str) -> str:
    """Return a pasted text with its lines ended as elsewhere, and without what controls a terminal."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(character for character in text if character in "\n\t" or not _is_control(character))


def _is_control(character: str) -> bool:
    return character < " " or "\x7f" <= character <= "\x9f"


def _seen(text: str) -> str:
    return text.replace("\t", "    ")
