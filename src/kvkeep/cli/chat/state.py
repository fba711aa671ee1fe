"""The state of a chat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvkeep.cli.chat.saving import Saver
from kvkeep.cli.chat.screen import Screen
from kvkeep.cli.chat.signals import EndSignals
from kvkeep.decode.chat import Conversation


class Leave(Exception):
    """The user leaves the chat."""


class Attachment(NamedTuple):
    """A file whose text precedes the next question."""

    path: str
    text: str


@dataclass
class Chat:
    """One run of the command."""

    talk: Conversation
    screen: Screen
    saver: Saver
    signals: EndSignals
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    at_end: str = "ask"
    """Action when the context is full: ask, or the name of a continuation."""
    attachments: list[Attachment] = field(default_factory=list)
    pending: str | None = None
    """The question that did not fit into the context."""
    read_per_s: float | None = None
    """Tokens per second at which the model has read a prompt; None before."""
    retries: int = 0
    """Number of resampled answers."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Answers and errors, in the form that ``--json`` prints."""
    failed: bool = False
    """Whether a line failed."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Options of an answer."""
        return {"max_new_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}

    def fail(self, line: str | None, error: str) -> None:
        """Record that a line failed. line: None if it could not be read."""
        self.turns.append({"question": line, "error": error})
        self.failed = True
