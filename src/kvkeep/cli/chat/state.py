"""The state of a chat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvkeep.cli.chat.saving import Saver
from kvkeep.cli.chat.screen import Screen
from kvkeep.decode.chat import Conversation


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
    model: str = ""
    """The model's name."""
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    at_end: str = "ask"
    """Action when the context is full: ask, or the name of a continuation."""
    attachments: list[Attachment] = field(default_factory=list)
    read_per_s: float | None = None
    """Tokens per second at which the model has read a prompt; None before."""
    retries: int = 0
    """Number of resampled answers."""
    failed: bool = False
    """Whether a line failed."""
