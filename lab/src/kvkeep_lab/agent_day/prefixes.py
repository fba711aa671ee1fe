"""The tokens of a request that a server has read before, as its client can know them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.decode.cached_text import common_prefix
from kvkeep.decode.prompt import prompt_text
from kvkeep_lab.agent_day.day import HEADER

Message = Mapping[str, Any]
_OTHER = {"role": "assistant", "content": "?"}
"""An answer that ends as no other does."""


class Prefixes:
    """The conversations that a server has read, with their answers as they were received, in the tokens of the model's
    own template. The line that changes with each session (:data:`~kvkeep_lab.agent_day.day.HEADER`) is left out, so
    that two sessions begin with the same tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: list[list[int]] = []

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a prompt."""
        plain = [_plain(message) for message in messages]
        plain[0]["content"] = _without_header(plain[0]["content"])
        return prompt_text(self._tokenizer, plain, tools=tools).ids(self._tokenizer)

    def reusable(self, ids: Sequence[int]) -> int:
        """Return the number of tokens with which a prompt begins and that have been read. The last token of a prompt
        is always read."""
        return max((common_prefix(known, ids[:-1]) for known in self._known), default=0)

    def add(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], answer: Message | None) -> None:
        """Note that a server has read a prompt, and written an answer. The tokens with which the template ends an
        answer are not among them."""
        if answer is None:
            self._known.append(self.ids(messages, tools))
            return
        known, other = (self.ids([*messages, one], tools) for one in (answer, _OTHER))
        self._known.append(known[: len(known) - common_prefix(known[::-1], other[::-1])])


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as chat templates take it: arguments of calls are objects."""
    found = {**message, "content": message["content"] or ""}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in calls
        ]
    return found


def _without_header(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(HEADER) else text
