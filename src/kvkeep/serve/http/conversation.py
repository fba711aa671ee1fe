"""What the protocols of conversations share: messages in one form, the tools that an answer may call, and the parts of
an answer.

A protocol converts its messages to the form that chat templates take (OpenAI's: a ``role``, a ``content`` of text, and
``reasoning_content``, ``tool_calls`` and ``tool_call_id`` where they belong), and an answer's parts to its own replies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from kvkeep.decode.tool_calls import CallPart, CallReader, Calls
from kvkeep.engine.forms import of_schema
from kvkeep.engine.pieces import TextPiece
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.protocol import ChatPrompt, FormOf, StreamEvent
from kvkeep.serve.session import Finished

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_MESSAGES, MAX_PARTS = 10_000, 1000
"""Messages of a request, and parts of one message."""

# -- requests ---------------------------------------------------------------------------------------------


def conversation(
    messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], field: str, continues: bool = False
) -> ChatPrompt:
    """Return the prompt of a conversation. The system messages at its beginning become one, as most templates take no
    more. field: the request's field with the messages, for errors. continues: whether the answer continues the last
    message. Raises APIError for results without a call, and for calls with one id."""
    found, known = list[dict[str, Any]](), set[str]()
    for number, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            if call["id"] in known:
                raise _wrong(field, f"two calls have the id '{call['id'][:100]}'; each needs one of its own")
            known.add(call["id"])
        result = message.get("tool_call_id")
        if result is not None and result not in known:
            raise _wrong(
                field,
                f"message {number} is the result of the call '{result[:100]}', which no earlier answer has; send that "
                "answer, too",
            )
        if message["role"] == "system" and found and found[-1]["role"] == "system" and len(found) == 1:
            found[0]["content"] += f"\n\n{message['content']}"
        else:
            found.append({**message})
    if not found:
        raise _wrong(field, "it has no messages; send at least one")
    if continues:
        return ChatPrompt(found[:-1], found[-1]["content"], tools)
    return ChatPrompt(found, tools=tools)


def _wrong(field: str, reason: str) -> APIError:
    return APIError(400, f"'{field}' is wrong: {reason}.", "invalid_value", field)


def called(number: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as chat templates take it."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, description: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates take it."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


@dataclass(frozen=True)
class AnswerForm:
    """What an answer may be."""

    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that it may call, as chat templates take them."""
    choice: Literal["none", "auto", "required"] = "auto"
    """Whether it calls tools."""
    allowed: Sequence[str] | None = None
    """The names of the only tools that it may call; None: all."""
    several: bool = True
    """It may have several calls."""
    schema: Mapping[str, Any] | None = None
    """The JSON Schema of its text."""
    field: str = "response_format"
    """The request's field with this schema."""

    @property
    def names(self) -> list[str]:
        """The names of the tools that the answer may call."""
        known = [one["function"]["name"] for one in self.tools]
        return [] if self.choice == "none" else [one for one in known if self.allowed is None or one in self.allowed]

    def form(self) -> tuple[str, FormOf] | None:
        """Return the field that gives the answer a form, and what makes this form; None: the answer may be any
        text."""
        if names := self.names:
            schemas = {one["function"]["name"]: one["function"].get("parameters", {}) for one in self.tools}
            calls = Calls([(one, schemas[one]) for one in names], self.choice == "required", self.several, self.schema)
            return "tools", calls.form
        schema = self.schema
        return None if schema is None else (self.field, lambda *_: of_schema(schema))

    def answered(self, number: str) -> Callable[[Finished], dict[str, Any]]:
        """Return what converts an answer to a message as chat templates take it. number: the answer's id."""
        parts = AnswerParts(self.reader(), number)

        def message(answer: Finished) -> dict[str, Any]:
            _, found = parts.all([answer])
            said = parts.joined(found)
            calls = [called(one.id, one.name, one.object) for one in said if isinstance(one, AnswerCall)]
            content = "".join(one for one in said if isinstance(one, str))
            return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})

        return message

    def reader(self) -> CallReader | None:
        """Return what finds the calls in the answer; None: it is text."""
        return CallReader(self.names) if self.names else None


# -- answers ----------------------------------------------------------------------------------------------

Part = str | CallPart
"""A part of an answer: its next text, or a part of a call."""


@dataclass
class AnswerCall:
    """A call in an answer."""

    id: str
    name: str
    arguments: str = ""
    """JSON; of an answer that was cut off, perhaps a part of it."""

    @property
    def object(self) -> dict[str, Any]:
        """The arguments; an empty object if they are not complete."""
        with suppress(ValueError):
            found = json.loads(self.arguments)
            return found if isinstance(found, dict) else {}
        return {}


def call_id(answer: str, index: int) -> str:
    """Return the id of a call, by its number in an answer with this id. Some templates take nine letters and digits,
    and nothing else."""
    digest = int.from_bytes(hashlib.sha256(f"{answer} {index}".encode()).digest()[:8])
    return "".join(_LETTERS[digest // len(_LETTERS) ** place % len(_LETTERS)] for place in range(9))


class AnswerParts:
    """The parts of an answer, from its events. reader: finds its calls; None: it is text. number: the answer's id."""

    def __init__(self, reader: CallReader | None, number: str) -> None:
        self._reader, self._number = reader, number

    @property
    def calls(self) -> bool:
        """Whether the answer has had a complete call."""
        return self._reader is not None and self._reader.complete > 0

    def add(self, event: TextPiece | Finished) -> list[Part]:
        """Return the parts that an event adds."""
        if isinstance(event, Finished):
            return [] if self._reader is None else self._reader.rest()
        if self._reader is None:
            return [event.text] if event.text else []
        return self._reader.add(event.text)

    def all(self, events: Sequence[StreamEvent]) -> tuple[Finished, list[Part]]:
        """Return the end and the parts of a complete answer. Raises the error that ended it."""
        last = events[-1]
        if isinstance(last, Exception):
            raise last
        assert isinstance(last, Finished)
        return last, [*self.add(TextPiece(last.text)), *self.add(last)]

    def begun(self, part: CallPart) -> AnswerCall:
        """Return the call of which this is the first part."""
        return AnswerCall(call_id(self._number, part.index), part.name, part.arguments)

    def joined(self, parts: Iterable[Part]) -> list[str | AnswerCall]:
        """Return the texts and calls of a complete answer in order."""
        found = list[str | AnswerCall]()
        for part in parts:
            before = found[-1] if found else None
            if isinstance(part, str):
                found[-1:] = [before + part] if isinstance(before, str) else [*found[-1:], part]
            elif part.name:
                found.append(self.begun(part))
            else:
                assert isinstance(before, AnswerCall)
                before.arguments += part.arguments
        return found
