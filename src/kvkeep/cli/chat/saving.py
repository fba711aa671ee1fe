"""Where a chat is kept: saved after each turn, and on a hang-up also where no session was named."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from kvkeep.decode.chat import Conversation
from kvkeep.decode.session_file import SessionFile
from kvkeep.decode.session_store import SessionStore, sessions_folder
from kvkeep.errors import KvkeepError, UsageError

HANGUP_PREFIX = "hangup-"
"""What the names of chats begin with that were saved on a hang-up, in the folder of sessions."""


class Saver:
    """Saves a conversation to the session ``named``, a path, or with ``folder`` a name there; None: to none yet."""

    def __init__(self, named: str | None = None, folder: str | None = None) -> None:
        if named is None and folder is not None:
            raise UsageError("A folder of sessions takes the name of one of them, too: --session NAME.")
        self.folder = folder
        self.session = None if named is None else self._open(named)
        self.saved = False
        self.unsaved: KvkeepError | None = None  # why the last save failed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.session is not None:
            self.session.close()

    def save(self, talk: Conversation) -> str | None:
        """Save where there is a session. Return the sentence of an error, None without one."""
        if self.session is None:
            return None
        try:
            talk.save(self.session)
        except KvkeepError as error:
            self.unsaved = error
            return str(error)
        self.unsaved, self.saved = None, True
        return None

    def save_as(self, talk: Conversation, named: str) -> str:
        """Save to the session ``named`` from now on; return its path. Raises SessionError, and UsageError where there
        is a conversation in it."""
        talk.check_savable()
        fresh = self._open(named)
        try:
            if fresh.turns:
                raise UsageError(f"There is a session in '{fresh.path}' already; name another.")
            talk.save(fresh)
        except BaseException:
            fresh.close()
            raise
        if self.session is not None:
            self.session.close()
        self.session, self.saved, self.unsaved = fresh, True, None
        return fresh.path

    def save_on_hangup(self, talk: Conversation) -> str:
        """Save a conversation without a session to the folder of sessions; return its path. Raises SessionError."""
        store = SessionStore(sessions_folder(self.folder))
        with store.open(f"{HANGUP_PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}") as file:
            os.chmod(file.path, 0o600)
            talk.save(file)
            return file.path

    def _open(self, named: str) -> SessionFile:
        """Return the session open for writing, which is made where there is none."""
        if self.folder is not None:
            return SessionStore(self.folder).open(named)
        path = os.path.expanduser(named)
        if not os.access(Path(os.path.realpath(path)).parent, os.W_OK):
            raise UsageError(f"The session cannot be kept in '{named}': its folder is missing or cannot be written to.")
        return SessionFile(path, writing=True)


def last_hangup() -> str | None:
    """Return the path of the last conversation that was saved on a hang-up, within a day; None without one."""
    with suppress(OSError, UsageError):  # a user without a home has none
        paths = sorted(sessions_folder().glob(f"{HANGUP_PREFIX}*.session"))
        if paths and time.time() - paths[-1].stat().st_mtime < 86400:
            return str(paths[-1])
    return None


def transcript(talk: Conversation) -> str:
    """Return what was said as Markdown."""
    names = {"system": "System", "user": "You", "assistant": "Model"}
    return "\n\n".join(f"**{names.get(one['role'], one['role'])}**\n\n{one['content']}" for one in talk.messages) + "\n"
