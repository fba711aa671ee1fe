"""Earlier questions, for the arrow keys: a file in the user's folder that nobody else can read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from kvkeep.errors import UsageError
from kvkeep.models.folders import data_folder

MAX_CHARACTERS = 4000
"""Of a question that is kept; a pasted text is not."""


class QuestionHistory(FileHistory):
    """Questions in a file; one that cannot be written is kept until the chat ends."""

    def store_string(self, string: str) -> None:
        """Append one question."""
        with suppress(OSError, UnicodeEncodeError):
            if len(string) <= MAX_CHARACTERS:
                super().store_string(string)


def history(remember: bool) -> History:
    """Return the questions of this and of earlier chats; of this chat alone without ``remember``, or if the file cannot
    be written."""
    with suppress(OSError, UsageError):
        if remember:
            return QuestionHistory(str(_ensure_private(data_folder() / "chat-history")))
    return InMemoryHistory()


def _ensure_private(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    return path
