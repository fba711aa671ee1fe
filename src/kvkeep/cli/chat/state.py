"""The state of a chat, and its session, which is saved after each turn."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvkeep.blocks.sessions import StoredSession, check_savable
from kvkeep.blocks.store import ONLY, place_of
from kvkeep.cli.chat.screen import Screen
from kvkeep.decode.chat import Conversation
from kvkeep.errors import KvkeepError, UsageError


class Saver:
    """Saves a conversation to the session ``name``: a path, or a name in the store in ``folder`` (None: the user's).
    None: no session yet."""

    def __init__(self, name: str | None = None, folder: str | None = None) -> None:
        if name is None and folder is not None:
            raise UsageError("--sessions needs the name of a session in the folder: --session NAME.")
        self.name, self.folder = name, folder
        self.session = None if name is None else self._open(name)
        self.saved = False
        self.error: KvkeepError | None = None
        """Why the last save failed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.session is not None:
            self.session.close()

    def save(self, talk: Conversation) -> None:
        """Save the conversation if it has a session, and note an error."""
        if self.session is None:
            return
        try:
            talk.save(self.session)
        except KvkeepError as error:
            self.error = error
        else:
            self.error, self.saved = None, True

    def save_as(self, talk: Conversation, name: str) -> None:
        """Save to the session ``name`` from this call on. Raises SessionError, and UsageError if the
        session contains a conversation."""
        check_savable(talk.cache)
        fresh = self._open(name)
        try:
            if fresh.saves:
                raise UsageError(f"There is a session '{name}' already; give another name.")
            talk.save(fresh)
        except BaseException:
            fresh.close()
            raise
        if self.session is not None:
            self.session.close()
        self.name, self.session, self.saved, self.error = name, fresh, True, None

    @property
    def place(self) -> str:
        """The end of the sentence "Saved ...". There has to be a session."""
        assert self.session is not None
        if self.session.name == ONLY:  # at a path
            return f"to {self.session.path}"
        return f"as '{self.session.name}'" + ("" if self.folder is None else f" in {self.folder}")

    def _open(self, name: str) -> StoredSession:
        """Return the session, open for writing; a missing one is created."""
        store, word = place_of(name, self.folder)
        if word != name:  # it is at a path
            store.check()
            if not os.access(Path(os.path.realpath(store.folder)).parent, os.W_OK):
                raise UsageError(
                    f"The session '{name}' cannot be saved: its folder is missing or cannot be written to."
                )
        return StoredSession(store, word, writing=True)


@dataclass
class Chat:
    """One run of the command."""

    talk: Conversation
    screen: Screen
    saver: Saver
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    settings: Mapping[str, float] = field(default_factory=dict)
    """Settings of sampling besides the temperature."""
    at_end: str = "ask"
    """Action when the context is full: ask, or the name of a continuation."""
    attachments: list[str] = field(default_factory=list)
    """The texts of files that precede the next question."""
    retries: int = 0
    """Number of resampled answers."""
    failed: bool = False
    """Whether a line failed."""
