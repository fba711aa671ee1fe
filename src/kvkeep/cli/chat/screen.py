"""The screen: a chat's input and output, on a terminal or in pipes.

On a terminal, prompt_toolkit reads the questions: lines can be edited and completed, and a pasted text of any length is
one question (a terminal by itself returns lines of at most 4,095 bytes). They are saved in a file that only the user
can read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import IO, Any

from rich.table import Table
from rich.text import Text

from kvkeep.cli import output
from kvkeep.cli.chat.markdown import MarkdownWriter
from kvkeep.decode.texts import check_text, standard_input
from kvkeep.errors import UsageError
from kvkeep.files import make_folder, open_file
from kvkeep.models.folders import data_folder

try:
    import termios
except ImportError:  # Windows echoes only at a prompt
    termios = None  # type: ignore[assignment]

MAX_CHARACTERS = 4000
"""Maximum characters of a remembered question; a pasted text is longer."""
_LINE = "that line"


class Screen:
    """The input and output of a chat. Raises UsageError if standard input is closed.

    ``ask()`` returns the next question, stripped. It raises EOFError after the last, KeyboardInterrupt for Ctrl-C, and
    UsageError for one that is not UTF-8. ``interactive``: a person types on a terminal. completions: returns those of a
    line, each with its meaning.
    """

    def __init__(self, completions: Callable[[str], Iterable[tuple[str, str]]]) -> None:
        source = standard_input()
        self.interactive = sys.stdin.isatty()
        self.ask: Callable[[], str] = _prompt(completions) if self.interactive else lambda: _line(source)

    def note(self, text: str) -> None:
        """Show a message."""
        output.note(text)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show rows of two columns as a message."""
        table = Table.grid(padding=(0, 2), pad_edge=False)
        table.add_column(overflow="fold", ratio=2, max_width=30)
        table.add_column(overflow="fold", ratio=3)
        for row in rows:
            table.add_row(*map(Text, row))
        output.err.print(table, style="dim")

    def reading(self, tokens: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show the progress of reading a prompt within the block."""
        return output.reading(tokens)

    @contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        """Yield a function that shows a piece of an answer: Markdown on a terminal, else the text. The last line ends
        with the block."""
        with _echo_off(self.interactive):
            if output.out.is_terminal and not output.out.is_dumb_terminal:
                writer = MarkdownWriter(output.out)
                try:
                    yield writer.add
                finally:
                    writer.close()
                return
            begun = False

            def say(text: str) -> None:
                nonlocal begun
                begun = True
                output.write_answer(text)

            try:
                yield say
                begun = True  # also an answer without text is a line
            finally:
                if begun:
                    output.write("\n")


def _line(source: IO[bytes]) -> str:
    if not (line := source.readline()):
        raise EOFError
    try:
        return line.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise UsageError(f"The text of {_LINE} is not UTF-8; the line is ignored.") from None


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


def _prompt(completions: Callable[[str], Iterable[tuple[str, str]]]) -> Callable[[], str]:
    """Return a function that asks on the terminal."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    class Commands(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Iterator[Completion]:
            line = document.text_before_cursor
            for word, meaning in completions(line):
                yield Completion(word, start_position=line.rfind(" ") + 1 - len(line), display_meta=meaning)

    terminal, keys = create_output(always_prefer_tty=True), KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session: PromptSession[str] = PromptSession(
        FormattedText([("bold", "> ")]),
        output=terminal,
        history=_history(),
        completer=Commands(),
        complete_while_typing=Condition(lambda: get_app().current_buffer.text.startswith("/")),
        prompt_continuation="  ",
        key_bindings=keys,
        enable_open_in_editor=True,
        reserve_space_for_menu=5,
    )

    def next_question() -> str:
        try:
            return check_text(session.prompt(handle_sigint=False).strip(), _LINE)
        except SystemExit:  # a signal may end it while it draws
            terminal.disable_bracketed_paste()
            terminal.flush()
            raise

    return next_question


def _history() -> Any:
    """Return the questions of this and of earlier chats; only those of this one if the file is not writable."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Questions(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError, UnicodeEncodeError):  # then it is kept until the chat ends
                if len(string) <= MAX_CHARACTERS:
                    super().store_string(string)

    with suppress(OSError, UsageError):
        path = data_folder() / "chat-history"
        make_folder(path.parent)
        os.close(open_file(path, os.O_RDWR | os.O_CREAT))
        return Questions(str(path))
    return InMemoryHistory()
