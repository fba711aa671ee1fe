"""Questions on a terminal, by prompt_toolkit: pasted text is one question, of any length; lines are edited, completed,
and remembered in a file that nobody else can read.

A terminal by itself gives lines of at most 4,095 bytes, so that a pasted text would be several questions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.output import create_output

from kvkeep.cli.chat.commands import completions
from kvkeep.cli.chat.input import LINE, Ask
from kvkeep.decode.prompt import check_text
from kvkeep.errors import UsageError
from kvkeep.models.folders import data_folder

MAX_CHARACTERS = 4000
"""Of a question that is remembered; a pasted text is not."""


def prompt(remember: bool) -> Ask:
    """Return a function that asks on the terminal. remember: keep the questions for later chats."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        FormattedText([("bold", "> ")]),
        output=create_output(always_prefer_tty=True),
        history=_history(remember),
        completer=_Commands(),
        complete_while_typing=Condition(lambda: get_app().current_buffer.text.startswith("/")),
        prompt_continuation="  ",
        key_bindings=keys,
        enable_open_in_editor=True,
        reserve_space_for_menu=5,
    )
    return lambda: check_text(session.prompt(handle_sigint=False).strip(), LINE)


class _Commands(Completer):
    def get_completions(self, document: Any, complete_event: Any) -> Iterator[Completion]:
        line = document.text_before_cursor
        for word, meaning in completions(line):
            yield Completion(word, start_position=line.rfind(" ") + 1 - len(line), display_meta=meaning)


class _Questions(FileHistory):
    """Questions in a file; one that cannot be written is kept until the chat ends."""

    def store_string(self, string: str) -> None:
        with suppress(OSError, UnicodeEncodeError):
            if len(string) <= MAX_CHARACTERS:
                super().store_string(string)


def _history(remember: bool) -> History:
    """Return the questions of this and of earlier chats; of this chat alone without ``remember``, or if the file cannot
    be written."""
    with suppress(OSError, UsageError):
        if remember:
            path = data_folder() / "chat-history"
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            return _Questions(str(path))
    return InMemoryHistory()
