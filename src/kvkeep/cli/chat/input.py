"""Input of a chat: a terminal, or a file of lines.

A terminal by itself gives a line at a time, at most 4,095 bytes of it, and makes several questions of a pasted
text; prompt_toolkit makes pasted text one question, has no limit of length, edits, remembers and completes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

from kvkeep.decode.prompt import check_text, standard_input
from kvkeep.errors import UsageError

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer

Ask = Callable[[], str]
"""Returns the next question, its ends stripped. Raises EOFError after the last, KeyboardInterrupt for Ctrl-C, and
UsageError for one that is not UTF-8."""
Completions = Callable[[str], Iterable[tuple[str, str]]]
"""Returns the words that can replace the last one of a line, each with its meaning."""

_NAME = "that line"


def lines() -> Ask:
    """Return a function that returns the lines of standard input. Raises UsageError where it is closed."""
    source = standard_input()
    return lambda: _line(source)


def typed(completions: Completions, remember: bool, **given: Any) -> Ask:
    """Return a function that asks on the terminal. remember: keep the questions for later chats. given: input and
    output of a :class:`~prompt_toolkit.PromptSession`."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    from kvkeep.cli.chat.history import history

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        FormattedText([("bold", "> ")]),
        **{"output": create_output(always_prefer_tty=True)} | given,
        history=history(remember),
        completer=_completer(completions),
        complete_while_typing=Condition(lambda: get_app().current_buffer.text.startswith("/")),
        prompt_continuation="  ",
        key_bindings=keys,
        enable_open_in_editor=True,
        reserve_space_for_menu=5,
    )
    return lambda: check_text(session.prompt(handle_sigint=False).strip(), _NAME)


def is_interactive() -> bool:
    """Return whether questions come from a terminal. Raises UsageError where standard input is closed."""
    standard_input()
    return sys.stdin.isatty()


def _completer(completions: Completions) -> Completer:
    from prompt_toolkit.completion import Completer, Completion

    class Words(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Iterator[Completion]:
            line = document.text_before_cursor
            last = len(line) - line.rfind(" ") - 1 if " " in line else len(line)
            for word, meaning in completions(line):
                yield Completion(word, start_position=-last, display_meta=meaning)

    return Words()


def _line(source: IO[bytes]) -> str:
    line = source.readline()
    if not line:
        raise EOFError
    try:
        return line.decode().strip()
    except UnicodeDecodeError:
        raise UsageError(f"The text of {_NAME} is not UTF-8; the line is ignored.") from None
