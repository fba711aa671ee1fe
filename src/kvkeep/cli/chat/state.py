"""What one chat consists of, for the loop and the commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvkeep.cli.chat.saving import Saver
from kvkeep.cli.chat.screen import Screen
from kvkeep.cli.chat.signals import EndSignals
from kvkeep.decode.chat import Conversation


class Leave(Exception):
    """The chat is over."""


class Attachment(NamedTuple):
    """A text that goes before the next question, and what it was read from."""

    path: str
    text: str


@dataclass
class Chat:
    """One run of the command.

    max_tokens, temperature, seed: of answers. at_end: what to do where the model's positions end, by name. attachments:
    what goes before the next question. pending: a question that there were no positions for. retries: how often answers
    were sampled again. turns: answers, and what failed, as ``--json`` prints them. failed: whether a line did.
    """

    talk: Conversation
    screen: Screen
    saver: Saver
    signals: EndSignals
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    at_end: str = "ask"
    attachments: list[Attachment] = field(default_factory=list)
    pending: str | None = None
    retries: int = 0
    turns: list[dict[str, Any]] = field(default_factory=list)
    failed: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        """Options of an answer."""
        return {"max_new_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}

    def fail(self, line: str | None, error: str) -> None:
        """Note that a line was not done. line: None for one that could not be read."""
        self.turns.append({"question": line, "error": error})
        self.failed = True
