"""Anthropic's messages (``/v1/messages``) and the count of their tokens: the fields of requests, and replies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator

from kvkeep.decode.answer_reader import CallPart, Part, Reasoning
from kvkeep.serve.http.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
    AnswerCall,
    AnswerForm,
    AnswerParts,
    ConversationRequest,
    called,
    conversation,
    effort_variables,
    ended,
    text_of,
    tool,
)
from kvkeep.serve.http.protocol import (
    MAX_STOPS,
    Context,
    Name,
    Object,
    Progress,
    Prompt,
    Reply,
    Stop,
    StreamEvent,
    Strict,
    Text,
    by_type,
    server_sent,
    wrong,
)
from kvkeep.serve.http.tools import MAX_TOOLS, named_once
from kvkeep.serve.session import Finished

# -- messages ---------------------------------------------------------------------------------------------


class Block(Strict):
    """A part of a message."""

    hints: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations"})


class TextBlock(Block):
    """A text."""

    type: Literal["text"]
    text: Text


class Thinking(Block):
    """Reasoning of an earlier answer."""

    hints: ClassVar[frozenset[str]] = Block.hints | {"signature"}

    type: Literal["thinking"]
    thinking: Text


class RedactedThinking(Block):
    """Encrypted reasoning of another server's answer. No model reads it."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUse(Block):
    """A call in an earlier answer."""

    hints: ClassVar[frozenset[str]] = Block.hints | {"caller"}

    type: Literal["tool_use"]
    id: Annotated[Name, Field(min_length=1)]
    name: Name
    input: Object


Texts = Text | Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_PARTS)]


class ToolResult(Block):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Texts = ""
    is_error: bool = False
    """The tool failed. Its content says so to the model."""


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("-text")]
    | Annotated[Thinking, Tag("-thinking")]
    | Annotated[RedactedThinking, Tag("-redacted_thinking")]
    | Annotated[ToolUse, Tag("-tool_use")]
    | Annotated[ToolResult, Tag("-tool_result")],
    by_type("it is of a type that is not supported; send texts, calls and their results"),
]


class InputMessage(Strict):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[AnyBlock], Field(fail_fast=True, max_length=MAX_PARTS)]

    @model_validator(mode="after")
    def _blocks_of_roles(self) -> InputMessage:
        for one in self.content if not isinstance(self.content, str) else ():
            of_answers = isinstance(one, Thinking | RedactedThinking | ToolUse)
            if (of_answers and self.role != "assistant") or (isinstance(one, ToolResult) and self.role != "user"):
                raise wrong(f"a message of the role '{self.role}' has no part of the type '{one.type}'")
        return self

    def plain(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that it is for chat templates: each result of a call is one of its own."""
        blocks = [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        for one in blocks:
            if isinstance(one, ToolResult):
                content = f"Error: {text_of(one.content)}" if one.is_error else text_of(one.content)
                yield {"role": "tool", "content": content, "tool_call_id": one.tool_use_id}
        texts = [one for one in blocks if isinstance(one, TextBlock)]
        found: dict[str, Any] = {"role": self.role, "content": text_of(texts)}
        thoughts = "\n".join(one.thinking for one in blocks if isinstance(one, Thinking))
        calls = [called(one.id, one.name, one.input) for one in blocks if isinstance(one, ToolUse)]
        if texts or calls or thoughts or not blocks:
            yield (
                found | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})
            )


Messages = Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


# -- requests ---------------------------------------------------------------------------------------------


class CustomTool(Strict):
    """A tool."""

    hints: ClassVar[frozenset[str]] = frozenset({
        "cache_control", "strict", "eager_input_streaming", "defer_loading", "allowed_callers", "input_examples",
    })  # fmt: skip

    type: Literal["custom"] = "custom"
    name: Annotated[Name, Field(min_length=1)]
    description: Text | None = None
    input_schema: Object
    """The JSON Schema of its arguments."""


Tools = Annotated[list[CustomTool], Field(fail_fast=True, max_length=MAX_TOOLS), BeforeValidator(named_once)]


class ToolChoice(Strict):
    """Which tools the answer may call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _with_name(self) -> ToolChoice:
        if (self.type == "tool") is not (self.name is not None):
            raise wrong("'name' belongs to the type 'tool', and to no other")
        return self


class OutputFormat(Strict):
    """The form of an answer."""

    type: Literal["json_schema"]
    schema_: Annotated[Object, Field(alias="schema")]


class OutputConfig(Strict):
    """How the answer is made."""

    hints: ClassVar[frozenset[str]] = frozenset({"task_budget"})

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """How much the model reasons before its answer, if its chat template knows that."""
    format: OutputFormat | None = None


class Thoughts(Strict):
    """Whether the model reasons before its answer."""

    hints: ClassVar[frozenset[str]] = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive"]


class CountRequest(Strict):
    """``POST /v1/messages/count_tokens``, and the fields of a prompt."""

    hints: ClassVar[frozenset[str]] = frozenset({
        "betas", "billing_policy", "cache_control", "context_management", "diagnostics", "inference_geo", "metadata",
        "service_tier", "speed", "user_profile_id", "workspace_id",
    })  # fmt: skip
    void: ClassVar[Mapping[str, Sequence[Any]]] = {"tools": ([],), "mcp_servers": ([],), "system": ("", [])}

    model: Name
    messages: Messages
    system: Texts | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thoughts | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None

    def given(self) -> Prompt:
        """Return the conversation up to its answer, or to the end of an answer that is the last message."""
        system = [] if self.system is None else [{"role": "system", "content": text_of(self.system)}]
        messages = [*system, *(one for message in self.messages for one in message.plain())]
        variables = effort_variables(self._effort)
        return conversation(messages, self.answer_form, "messages", continues=self.continues, variables=variables)

    @property
    def _effort(self) -> str | None:
        """How much the model reasons, in OpenAI's words."""
        thinks, effort = None if self.thinking is None else self.thinking.type, self.output_config.effort
        if thinks == "disabled":
            return "none"
        if effort is None:
            return "medium" if thinks == "enabled" else None
        return "high" if effort in ("xhigh", "max") else effort

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        last = [*self.messages[-1].plain()][-1:]
        return bool(last) and last[0]["role"] == "assistant" and "tool_calls" not in last[0]

    @property
    def answer_form(self) -> AnswerForm:
        """What the answer may be."""
        choice, format_ = self.tool_choice, self.output_config.format or self.output_format
        field = "output_config.format" if self.output_config.format else "output_format"
        return AnswerForm(
            [tool(one.name, one.description, one.input_schema) for one in self.tools or ()],
            "required" if choice.type == "any" or choice.type == "tool" else choice.type,
            None if choice.name is None else [choice.name],
            choice.name is None and not choice.disable_parallel_tool_use,
            None if format_ is None else format_.schema_,
            field,
            "any",
        )


class MessagesRequest(CountRequest, ConversationRequest):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]
    """The maximum number of tokens of the answer."""
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None

    @property
    def token_limit(self) -> int:
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        return self.stop_sequences or []

    def reply(self, context: Context) -> Reply:
        return MessageReply(context, AnswerParts(context, self.calls()))


SIGNATURE = "kvkeep"
"""The signature of reasoning, which Anthropic's servers check and this one does not."""

# -- replies ----------------------------------------------------------------------------------------------


class MessageReply:
    """The reply of a request."""

    def __init__(self, context: Context, parts: AnswerParts) -> None:
        self._context, self._parts = context, parts
        self._head: dict[str, Any] = {
            "id": f"msg_{context.id}", "type": "message", "role": "assistant", "model": context.model,
        }  # fmt: skip

    def complete(self, events: Sequence[StreamEvent]) -> dict[str, Any]:
        """Return the answer as one object. Raises the error that ended it."""
        last = ended(events)
        content = [_block(one) for one in self._parts.joined(last)]
        return (
            self._head | {"content": content, **self._end(last), "usage": usage(last)} | self._context.extension(last)
        )

    def _end(self, answer: Finished) -> dict[str, Any]:
        """Return why an answer ended."""
        if answer.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
        ended = "tool_use" if self._parts.calls else "end_turn"
        return {"stop_reason": ended if answer.reason == "stop" else "max_tokens", "stop_sequence": None}

    async def stream(self, events: AsyncIterator[StreamEvent | Progress]) -> AsyncIterator[str]:
        """Yield the answer as server-sent events. An error is an event, and progress is a comment and a ``ping``."""
        began = {"input_tokens": self._context.prompt_tokens, "output_tokens": 0}
        message = self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": began}
        yield _event("message_start", message=message)
        index, kind = -1, ""  # the block that is open
        async for event in events:
            if isinstance(event, Progress):
                yield event.comment + _event("ping")
                continue
            if isinstance(event, Exception):
                yield server_sent(self._context.to_error(event).anthropic(), "error")
                return
            for part in self._parts.add(event):
                begins = self._begun(part)
                if begins["type"] != kind or (isinstance(part, CallPart) and part.name):
                    if kind:
                        yield _closed(index, kind)
                    index, kind = index + 1, begins["type"]
                    yield _event("content_block_start", index=index, content_block=begins)
                if delta := _delta(part):
                    yield _event("content_block_delta", index=index, delta=delta)
            if isinstance(event, Finished):
                if kind:
                    yield _closed(index, kind)
                end = {"delta": self._end(event), "usage": usage(event)}
                yield _event("message_delta", **end, **self._context.extension(event))
                yield _event("message_stop")

    def _begun(self, part: Part) -> dict[str, Any]:
        """Return the empty block that begins with a part."""
        if isinstance(part, CallPart):
            return _block(replace(self._parts.begun(part), arguments=""))
        return _block(Reasoning("") if isinstance(part, Reasoning) else "")


def _event(kind: str, **fields: Any) -> str:
    return server_sent({"type": kind, **fields}, kind)


def _closed(index: int, kind: str) -> str:
    """Return the end of a block. The clients of reasoning expect a signature."""
    signed = {"type": "signature_delta", "signature": SIGNATURE}
    signature = _event("content_block_delta", index=index, delta=signed) if kind == "thinking" else ""
    return signature + _event("content_block_stop", index=index)


def _block(said: str | Reasoning | AnswerCall) -> dict[str, Any]:
    """Return a block of an answer."""
    if isinstance(said, str):
        return {"type": "text", "text": said}
    if isinstance(said, Reasoning):
        return {"type": "thinking", "thinking": said.text, "signature": SIGNATURE if said.text else ""}
    return {"type": "tool_use", "id": said.id, "name": said.name, "input": said.object}


def _delta(part: Part) -> dict[str, Any]:
    """Return what a part adds to its block; empty: nothing."""
    if isinstance(part, str):
        return {"type": "text_delta", "text": part}
    if isinstance(part, Reasoning):
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "input_json_delta", "partial_json": part.arguments} if part.arguments else {}


def usage(answer: Finished) -> dict[str, Any]:
    """Return the numbers of tokens. ``input_tokens`` are those that were read."""
    return {
        "input_tokens": answer.read,
        "cache_read_input_tokens": answer.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.written,
    }
