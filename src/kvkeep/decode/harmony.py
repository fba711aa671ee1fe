"""The format of gpt-oss (harmony): an answer is a chain of messages, each in a channel.

``<|channel|>analysis<|message|>`` begins reasoning, ``<|channel|>final<|message|>`` the answer, and
``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>`` a call, which ends with the answer. The
recipient may also stand before the channel. ``<|end|><|start|>assistant`` stands between two messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import regex

from kvkeep.decode.answer_reader import AnswerReader, Part, Reasoning, Schemas
from kvkeep.decode.lark import TEXT, Rules

MARKS = [f"<|{name}|>" for name in ("channel", "message", "end", "start", "call", "constrain")]
CHANNEL, MESSAGE, END, START, CALL, CONSTRAIN = MARKS
CALLED = " to=functions."
"""Before the name of a tool."""
_TO = r"(?:\s*to=(?:functions\.)?(?P<%s>%s|\S+?))?"
"""The recipient of a message: a tool, or another one."""


def rules_of(
    rules: Rules,
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    required: bool,
    content: Mapping[str, Any] | str | None,
) -> str:
    """Return the first rule of answers in this format. content: the schema, or the form, of the answer's text."""
    thought = f"{rules.literal(CHANNEL + 'analysis' + MESSAGE)} {rules.until(TEXT, END)}"
    said = f"{rules.literal(CHANNEL + 'commentary' + MESSAGE)} {rules.until(TEXT, END)}"
    rules.add("next", rules.literal(f"{START}assistant"))
    text = TEXT if content is None else rules.other(content) if isinstance(content, str) else rules.schema(content)
    final = f"{rules.literal(CHANNEL + 'final' + MESSAGE)} {text}"
    calls = list[str]()
    for number, (name, schema) in enumerate(tools):
        to, json = f"{rules.plain(CALLED + name)}", rules.literal(f" {CONSTRAIN}json{MESSAGE}")
        channel, plain = rules.literal(f"{CHANNEL}commentary"), rules.literal(f" json{MESSAGE}")
        head = f"{to} {channel} ({plain} | {json}) | {channel} {to} {json}"
        rules.add(f"call_{number}", f"({head}) {rules.schema({'type': 'object', **schema}, lenient=True)}")
        calls.append(f"call_{number}")
    last = " | ".join(calls if required else [*calls, final])
    return f"(({thought} | {said}) next)* ({last})" if calls else f"({thought} next)* ({last})"


class HarmonyReader(AnswerReader):
    """Reads answers in this format."""

    def __init__(self, tools: Schemas) -> None:
        super().__init__()
        self._tools, self._channel = tools, ""
        names = "|".join(re.escape(name) for name in sorted(tools, key=len, reverse=True)) or r"\S+?"
        head = r"\s*(?:<\|start\|>assistant)?" + _TO % ("before", names) + r"<\|channel\|>(?P<channel>\w+)"
        head += _TO % ("after", names) + r"\s*(?:<\|constrain\|>)?(?:\w+)?<\|message\|>"
        self._head = regex.compile(head)

    def _begin(self, ended: bool) -> Part | None:
        """The head of a message."""
        hit = self._head.match(self._waiting, partial=True)
        if hit is None:
            self._channel = "final"
            return self._to(self._message)
        if hit.partial:
            return self._to(self._end) if ended else None
        self._channel = hit["channel"]
        self._to(self._message, self._waiting[hit.end() :])
        name = hit["before"] or hit["after"] or ""
        if name in self._tools:
            self._state = self._last_arguments
            return self._next_call(name)
        return ""

    def _message(self, ended: bool) -> Part | None:
        text, after = self._text_until(END, ended)
        if after is not None:
            self._to(self._begin, after)
        if not text:
            return None if after is None else ""
        return Reasoning(text) if self._channel == "analysis" else text
