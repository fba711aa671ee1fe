"""What one chat consists of, for the loop and the commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvkeep.cli.chat.endings import Endings
from kvkeep.cli.chat.keeper import Keeper
from kvkeep.cli.chat.screen import Screen
from kvkeep.decode.chat import Conversation


class Leave(Exception):
    """The chat is over."""


@dataclass
class Chat:
    """One run of the command.

    max_tokens, temperature, seed: of answers. at_end: what to do where the model's positions end, by name. attached:
    texts of files that go before the next question. waiting: a question that there were no positions for. tries: how
    often answers were sampled again. turns: answers as ``--json`` prints them.
    """

    talk: Conversation
    screen: Screen
    keeper: Keeper
    endings: Endings
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    at_end: str = "ask"
    attached: list[str] = field(default_factory=list)
    waiting: str | None = None
    tries: int = 0
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def sampling(self) -> dict[str, Any]:
        """Options of an answer."""
        return {"max_new_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
