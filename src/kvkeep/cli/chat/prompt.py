"""Questions on a terminal, by prompt_toolkit. A pasted text of any length is one question. Lines can be edited and
completed, and are saved in a file that only the user can read.

A terminal without it returns lines of at most 4,095 bytes, which would split a pasted text into several questions.
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
from kvkeep.private_files import make_folder, open_file

MAX_CHARACTERS = 4000
"""Maximum characters of a remembered question; a pasted text is longer."""


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
    """Questions in a file. If the file is not writable, they are kept until the chat ends."""

    def store_string(self, string: str) -> None:
        with suppress(OSError, UnicodeEncodeError):
            if len(string) <= MAX_CHARACTERS:
                super().store_string(string)


def _history(remember: bool) -> History:
    """Return the questions of this and of earlier chats. Without ``remember``, or if the file is not writable, only
    those of this chat."""
    with suppress(OSError, UsageError):
        if remember:
            path = data_folder() / "chat-history"
            make_folder(path.parent)
            os.close(open_file(path, os.O_RDWR | os.O_CREAT))
            return _Questions(str(path))
    return InMemoryHistory()
