"""The items and the tools of OpenAI's responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, Tag

from kvkeep.serve.http.conversation import MAX_PARTS, called, text_of
from kvkeep.serve.http.protocol import Name, Object, Strict, Text, by_type
from kvkeep.serve.http.tools import MAX_TOOLS, CalledFunction, named_once


class Item(Strict):
    """An item of the input."""

    hints: ClassVar[frozenset[str]] = frozenset(
        {"id", "status", "phase", "caller", "agent", "async", "parsed_arguments"}
    )


class InputText(Item):
    """A text of a message."""

    hints: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: Text


Texts = Text | Annotated[list[InputText], Field(fail_fast=True, max_length=MAX_PARTS)]


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts


class FunctionCall(Item, CalledFunction):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Annotated[Name, Field(min_length=1)]
    namespace: Name | None = None


class CustomCall(Item):
    """A call of a custom tool, whose input is a text."""

    type: Literal["custom_tool_call"]
    call_id: Annotated[Name, Field(min_length=1)]
    name: Name
    input: Text
    namespace: Name | None = None


class CallOutput(Item):
    """What a call returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: Texts


class ReasoningItem(Item):
    """Reasoning of an earlier answer. An encrypted one is another server's, and no model reads it."""

    hints: ClassVar[frozenset[str]] = Item.hints | {"encrypted_content"}

    type: Literal["reasoning"]
    summary: Texts = ""
    content: Texts = ""


AnyItem = Annotated[
    Annotated[MessageItem, Tag("-message")]
    | Annotated[FunctionCall, Tag("-function_call")]
    | Annotated[CustomCall, Tag("-custom_tool_call")]
    | Annotated[CallOutput, Tag("-output")]
    | Annotated[ReasoningItem, Tag("-reasoning")],
    by_type(
        "it is of a type that is not supported; send messages, calls and their outputs",
        dict.fromkeys(("function_call_output", "custom_tool_call_output"), "output"),
    ),
]


def messages_of(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Return items as messages of chat templates: what follows each other of one answer is one message."""
    found = list[dict[str, Any]]()
    for one in items:
        if isinstance(one, CallOutput):
            found.append({"role": "tool", "content": text_of(one.output), "tool_call_id": one.call_id})
            continue
        if isinstance(one, MessageItem) and one.role != "assistant":
            found.append({"role": "user" if one.role == "user" else "system", "content": text_of(one.content)})
            continue
        if not found or found[-1]["role"] != "assistant":
            found.append({"role": "assistant", "content": ""})
        answer = found[-1]
        if isinstance(one, MessageItem):
            answer["content"] += ("\n" if answer["content"] else "") + text_of(one.content)
        elif isinstance(one, ReasoningItem):
            if thoughts := text_of(one.content) or text_of(one.summary):
                before = answer.get("reasoning_content")
                answer["reasoning_content"] = f"{before}\n{thoughts}" if before else thoughts
        else:
            arguments = {"input": one.input} if isinstance(one, CustomCall) else json.loads(one.arguments or "{}")
            answer.setdefault("tool_calls", []).append(
                called(one.call_id, full_name(one.namespace, one.name), arguments)
            )
    return found


class FunctionTool(Strict):
    """A function that the answer may call; of the type custom, its only argument is a text, ``input``."""

    hints: ClassVar[frozenset[str]] = frozenset({"strict", "format", "defer_loading", "allowed_callers"})

    type: Literal["function", "custom"]
    name: Annotated[Name, Field(min_length=1)]
    description: Text | None = None
    parameters: Object = Field(default_factory=dict)
    """The JSON Schema of its arguments."""
    output_schema: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The JSON Schema of the arguments of either type."""
        if self.type == "function":
            return self.parameters
        text = {"input": {"type": "string"}}
        return {"type": "object", "properties": text, "required": ["input"], "additionalProperties": False}


class Namespace(Strict):
    """Functions with a common name before their own ones."""

    type: Literal["namespace"]
    name: Annotated[Name, Field(min_length=1)]
    description: Text | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


HOSTED = (
    "web_search", "web_search_preview", "local_shell", "shell", "apply_patch", "file_search", "code_interpreter",
    "image_generation", "computer_use_preview", "tool_search",
)  # fmt: skip
"""Types of tools that OpenAI's servers run themselves. They are left out, and the reply says so."""


class HostedTool(BaseModel):
    """A tool of one of these types, with any fields."""

    type: str


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("-function")]
    | Annotated[Namespace, Tag("-namespace")]
    | Annotated[HostedTool, Tag("-hosted")],
    by_type(
        "it is of a type that is not supported; send functions",
        {"custom": "function", **dict.fromkeys(HOSTED, "hosted")},
    ),
]
Tools = Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS), BeforeValidator(named_once)]


def full_name(namespace: str | None, name: str) -> str:
    """Return the name of a function for the model."""
    return name if namespace is None else f"{namespace}__{name}"


def functions(tools: Sequence[Any]) -> Iterator[tuple[str, str | None, FunctionTool]]:
    """Yield the name for the model of each function, its namespace, and the function."""
    for one in tools:
        if isinstance(one, FunctionTool):
            yield one.name, None, one
        elif isinstance(one, Namespace):
            yield from ((full_name(one.name, inner.name), one.name, inner) for inner in one.tools)
