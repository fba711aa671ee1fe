"""The screen: a chat's input and output, on a terminal or in pipes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from rich.table import Table

from kvkeep.cli import output
from kvkeep.cli.chat.input import Ask
from kvkeep.cli.chat.markdown import MarkdownWriter

try:
    import termios
except ImportError:  # Windows echoes only at a prompt
    termios = None  # type: ignore[assignment]

Say = Callable[[str], None]


class Screen:
    """The input and output of a chat.

    ask: returns the next question. interactive: a person types on a terminal. silent: do not show answers. plain: show
    answers as text, without rendering Markdown.
    """

    def __init__(self, ask: Ask, *, interactive: bool = False, silent: bool = False, plain: bool = False) -> None:
        self.ask, self.interactive, self.silent = ask, interactive, silent
        self._terminal = output.out.is_terminal
        self._paints = self._terminal and not plain and not output.out.is_dumb_terminal
        self.write_error: OSError | None = None
        """Why standard output cannot be written to."""

    def note(self, text: str) -> None:
        """Show a message."""
        output.note(text)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show rows of two columns as a message."""
        if not output.err.is_terminal:
            for row in rows:
                output.note("  ".join(row))
            return
        table = Table.grid(padding=(0, 2), pad_edge=False)
        table.add_column(overflow="fold", ratio=2, max_width=30)
        table.add_column(overflow="fold", ratio=3)
        for row in rows:
            table.add_row(*(one.replace("[", r"\[") for one in row))
        output.err.print(table, style="dim")

    def reading(self, tokens: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show the progress of reading a prompt within the block."""
        return output.reading(tokens, silent=self.silent)

    @contextmanager
    def answer(self) -> Iterator[Say]:
        """Yield a function that shows a piece of an answer. The last line ends with the block. A write error is stored
        in ``write_error``."""
        if self.silent:
            yield lambda text: None
            return
        writer = MarkdownWriter(output.out, output.write) if self._paints else _Plain(self._terminal)

        def safely(write: Callable[[], None]) -> None:
            try:
                write()
            except OSError as error:
                self.write_error = error

        with _echo_off(self.interactive):
            try:
                yield lambda text: safely(lambda: writer.add(text))
                safely(lambda: writer.add(""))  # starts an answer without text
            finally:
                safely(writer.close)


class _Plain:
    """Writes an answer unchanged; a terminal gets it without control characters."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._written = False

    def add(self, text: str) -> None:
        """Write a piece."""
        self._written = self._written or bool(text) or not self._terminal
        output.write_answer(text)

    def close(self) -> None:
        """End the last line, if needed. In a pipe every answer ends with a line end."""
        if self._written:
            output.write("\n")


@contextmanager
def _echo_off(interactive: bool) -> Iterator[None]:
    """Turn off the echo of the terminal within the block, because typed text would mix with an answer. The next
    question receives the typed text."""
    with ExitStack() as stack:
        if interactive and termios is not None:
            with suppress(termios.error):  # the terminal may be closed
                handle = sys.stdin.fileno()
                before = termios.tcgetattr(handle)
                termios.tcsetattr(handle, termios.TCSANOW, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
                stack.enter_context(suppress(termios.error))
                stack.callback(termios.tcsetattr, handle, termios.TCSANOW, before)
        yield
