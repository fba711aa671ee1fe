"""What the protocols of conversations share: messages in one form, the tools that an answer may call, and the parts of
an answer.

A protocol converts its messages to the form that chat templates take (OpenAI's: a ``role``, a ``content`` of text, and
``reasoning_content``, ``tool_calls`` and ``tool_call_id`` where they belong), and an answer's parts to its own replies.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from kvkeep.decode.answer_form import Calls
from kvkeep.decode.answer_reader import CallPart, Part, Reasoning
from kvkeep.engine.forms import of_schema
from kvkeep.engine.pieces import TextPiece
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.protocol import AnswerRequest, ChatPrompt, Context, FormOf, StreamEvent
from kvkeep.serve.session import Finished

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_MESSAGES, MAX_PARTS = 10_000, 1000
"""Messages of a request, and parts of one message."""

# -- requests ---------------------------------------------------------------------------------------------


def conversation(
    messages: Iterable[Mapping[str, Any]],
    form: AnswerForm,
    field: str,
    *,
    continues: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """Return the prompt of a conversation. The system messages at its beginning become one, as most templates take no
    more. field: the request's field with the messages, for errors. continues: whether the answer continues the last
    message. variables: more variables of the chat template. Raises APIError for results without a call, for calls with
    one id, and for a choice of tools that are not there."""
    _check_choice(form)
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
        if more := {"tool_calls", "reasoning_content"} & found[-1].keys():
            raise _wrong(field, f"the last message is to be continued, and has '{min(more)}'; leave that out")
        return ChatPrompt(found[:-1], found[-1]["content"], form.tools, variables or {})
    return ChatPrompt(found, "", form.tools, variables or {})


def _check_choice(form: AnswerForm) -> None:
    names = {one["function"]["name"] for one in form.tools}
    missing = next((one for one in form.allowed or () if one not in names), None)
    if missing is not None:
        raise _wrong("tool_choice", f"no tool is called '{missing[:100]}'; add it to 'tools'")
    if form.choice == "required" and form.allowed is None and not names:
        raise _wrong("tool_choice", f"'{form.required}' needs 'tools'; add them, or leave it out")


def _wrong(field: str, reason: str) -> APIError:
    return APIError(400, f"'{field}' is wrong: {reason}.", "invalid_value", field)


def text_of(content: str | list[Any]) -> str:
    """Return the text of a message's content, or of its parts, which have a ``text`` each."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def called(identifier: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as chat templates take it."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, description: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates take it."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Return the variables of chat templates for a request's effort of reasoning; None: it has none."""
    if effort is None:
        return {}
    found: dict[str, Any] = dict.fromkeys(("enable_thinking", "thinking"), effort != "none")
    return found if effort == "none" else found | {"reasoning_effort": effort}


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
    required: str = "required"
    """The protocol's word for the choice to call a tool."""


class ConversationRequest(AnswerRequest):
    """A request for the next answer of a conversation."""

    @property
    @abstractmethod
    def answer_form(self) -> AnswerForm:
        """What the answer may be."""

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        return False

    def calls(self) -> Calls:
        """Return which calls the answer may have."""
        given = self.answer_form
        schemas = {one["function"]["name"]: one["function"].get("parameters", {}) for one in given.tools}
        allowed = () if given.choice == "none" else schemas if given.allowed is None else given.allowed
        tools = [(name, schema) for name, schema in schemas.items() if name in allowed]
        return Calls(tools, given.choice == "required", given.several, given.schema)

    def form(self) -> tuple[str, FormOf] | None:
        """Return the form of the answer, as :meth:`AnswerRequest.form`."""
        schema, calls = self.answer_form.schema, self.calls()
        if calls.tools:
            return "tools", lambda answers, known: answers.form(calls, known)
        if schema is not None:
            return self.answer_form.field, lambda answers, known: answers.after_reasoning(of_schema(schema), known)
        return super().form()

    def answered(self, context: Context) -> Callable[[Finished], Mapping[str, Any]] | None:
        """Return what converts an answer to a message as chat templates take it; None: it continues one."""
        if self.continues:
            return None
        parts = AnswerParts(context, self.calls())
        return lambda answer: message_of(parts.joined(answer), lambda one: called(one.id, one.name, one.object))


# -- answers ----------------------------------------------------------------------------------------------


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
    """Return the id of a call, by its number in an answer: some templates take only nine letters and digits."""
    digest = int.from_bytes(hashlib.sha256(f"{answer} {index}".encode()).digest()[:8])
    return "".join(_LETTERS[digest // len(_LETTERS) ** place % len(_LETTERS)] for place in range(9))


class AnswerParts:
    """The parts of an answer, from its events. calls: those that it may have."""

    def __init__(self, context: Context, calls: Calls) -> None:
        self._reader, self._answer_id = context.answers.reader(calls), context.id

    @property
    def calls(self) -> bool:
        """Whether the answer has had a complete call."""
        return self._reader.complete > 0

    def add(self, event: TextPiece | Finished) -> list[Part]:
        """Return the parts that an event adds."""
        return self._reader.rest() if isinstance(event, Finished) else self._reader.add(event.text)

    def all(self, answer: Finished) -> list[Part]:
        """Return the parts of a complete answer."""
        return [*self.add(TextPiece(answer.text)), *self.add(answer)]

    def begun(self, part: CallPart) -> AnswerCall:
        """Return the call of which this is the first part."""
        return AnswerCall(call_id(self._answer_id, part.index), part.name, part.arguments)

    def joined(self, answer: Finished) -> list[str | Reasoning | AnswerCall]:
        """Return the texts, the reasoning and the calls of a complete answer in order."""
        found = list[str | Reasoning | AnswerCall]()
        for part in self.all(answer):
            before = found[-1] if found else None
            if isinstance(part, str) and isinstance(before, str):
                found[-1] = before + part
            elif isinstance(part, Reasoning) and isinstance(before, Reasoning):
                found[-1] = Reasoning(before.text + part.text)
            elif not isinstance(part, CallPart):
                found.append(part)
            elif part.name:
                found.append(self.begun(part))
            else:
                assert isinstance(before, AnswerCall)
                before.arguments += part.arguments
        return found


def message_of(
    said: Sequence[str | Reasoning | AnswerCall], call: Callable[[AnswerCall], dict[str, Any]]
) -> dict[str, Any]:
    """Return the message of an answer. call: converts its calls."""
    content = "".join(one for one in said if isinstance(one, str))
    reasoning = "".join(one.text for one in said if isinstance(one, Reasoning))
    optional = {
        "reasoning_content": reasoning,
        "tool_calls": [call(one) for one in said if isinstance(one, AnswerCall)],
    }
    return {"role": "assistant", "content": content} | {name: one for name, one in optional.items() if one}


def ended(events: Sequence[StreamEvent]) -> Finished:
    """Return the end of a complete answer. Raises the error that ended it."""
    last = events[-1]
    if isinstance(last, Exception):
        raise last
    assert isinstance(last, Finished)
    return last
