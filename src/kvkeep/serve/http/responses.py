"""OpenAI's responses, ``/v1/responses``: the fields of requests, and replies.

A response is recorded (:mod:`kvkeep.blocks.records`) unless its request says ``"store": false``, and a later request
continues it by ``previous_response_id``.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr, Tag, field_validator

from kvkeep.blocks.records import OwnerRecords, Records
from kvkeep.decode.answer_reader import CallPart, Part, Reasoning
from kvkeep.serve.http.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
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
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.protocol import (
    Context,
    Name,
    Object,
    Progress,
    Prompt,
    Reply,
    StreamEvent,
    Strict,
    Text,
    by_type,
    server_sent,
    wrong,
)
from kvkeep.serve.http.tools import MAX_TOOLS, CalledFunction, named_once
from kvkeep.serve.session import Finished

MAX_EARLIER = 1000
"""Earlier responses that a request continues."""

# -- input ------------------------------------------------------------------------------------------------


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


def _messages(items: Sequence[Any]) -> list[dict[str, Any]]:
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
                answer["reasoning_content"] = thoughts
        else:
            arguments = {"input": one.input} if isinstance(one, CustomCall) else json.loads(one.arguments or "{}")
            answer.setdefault("tool_calls", []).append(called(one.call_id, _full(one.namespace, one.name), arguments))
    return found


# -- requests ---------------------------------------------------------------------------------------------


class FunctionTool(Strict):
    """A function that the answer may call; of the type custom, its only argument is a text, ``input``."""

    hints: ClassVar[frozenset[str]] = frozenset({"strict", "format", "defer_loading", "allowed_callers"})

    type: Literal["function", "custom"]
    name: Annotated[Name, Field(min_length=1)]
    description: Text | None = None
    parameters: Object = Field(default_factory=dict)
    """The JSON Schema of its arguments."""
    output_schema: Any = None


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


def _full(namespace: str | None, name: str) -> str:
    """Return the name of a function for the model."""
    return name if namespace is None else f"{namespace}__{name}"


class ChosenTool(Strict):
    """A tool that the answer may call."""

    type: Literal["function", "custom"]
    name: Name


class AllowedTools(Strict):
    """The only tools that the answer may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class TextFormat(Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: Object | None = Field(default=None, alias="schema")
    strict: bool = False
    """Answers always obey the schema."""


class TextOptions(Strict):
    """The form of an answer, and how long it should be."""

    hints: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat = TextFormat(type="text")


class Effort(Strict):
    """How much the model reasons before its answer."""

    hints: ClassVar[frozenset[str]] = frozenset({"context", "generate_summary", "mode", "summary"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponseRequest(ConversationRequest):
    """``POST /v1/responses``."""

    hints: ClassVar[frozenset[str]] = frozenset({
        "client_metadata", "context_management", "include", "max_tool_calls", "metadata", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
        "stream_options", "truncation", "user",
    })  # fmt: skip
    void: ClassVar[Mapping[str, Sequence[Any]]] = {"tools": ([],), "background": (False,), "top_logprobs": (0,)}

    input: Text | Annotated[list[AnyItem], Field(fail_fast=True, max_length=MAX_MESSAGES)] = ""
    instructions: Text | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    """The answer may have several calls."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """The maximum number of tokens of the answer."""
    reasoning: Effort = Effort()
    text: TextOptions = TextOptions()
    previous_response_id: Name | None = None
    store: bool = True
    """Whether the response is recorded."""
    _records: OwnerRecords = PrivateAttr(default_factory=lambda: Records().of(""))

    def using(self, records: OwnerRecords) -> ResponseRequest:
        """Return the request, which continues and adds to these records."""
        self._records = records
        return self

    @field_validator("tool_choice")
    @classmethod
    def _of_tools(cls, given: Any, known: Any) -> Any:
        names = [name for name, *_ in _functions(known.data.get("tools") or ())]
        wanted = [given.name] if isinstance(given, ChosenTool) else []
        wanted = [one.name for one in given.tools] if isinstance(given, AllowedTools) else wanted
        missing = next((one for one in wanted if one not in names), None)
        if missing is not None:
            raise wrong(f"no tool is called '{missing[:100]}'; add it to 'tools'")
        if given == "required" and not names:
            raise wrong("'required' needs 'tools'; add them, or leave it out")
        return given

    @property
    def token_limit(self) -> int | None:
        """The maximum number of tokens of the answer, if the request sets one."""
        return self.max_output_tokens

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the input."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else _messages(self.input)

    def given(self) -> Prompt:
        """Return the conversation up to its answer, the responses that it continues before it."""
        earlier = list[list[dict[str, Any]]]()
        response_id = self.previous_response_id
        while response_id is not None:
            record = self._records.get(response_id) if len(earlier) < MAX_EARLIER else None
            if record is None or "response" not in record:
                raise APIError(
                    404,
                    f"There is no response '{response_id[:100]}' that can be continued; send the conversation itself.",
                    "previous_response_not_found",
                    "previous_response_id",
                )
            earlier.append(record["messages"])
            response_id = record["previous"]
            if sum(map(len, earlier)) > MAX_MESSAGES:
                sentence = f"The responses before this one have more than {MAX_MESSAGES} messages; send fewer of them."
                raise APIError(400, sentence, "context_length_exceeded", "previous_response_id")
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        before = [message for messages in reversed(earlier) for message in messages]
        messages, variables = [*system, *before, *self.messages()], effort_variables(self.reasoning.effort)
        return conversation(messages, self.answer_form.tools, "input", variables=variables)

    @property
    def answer_form(self) -> AnswerForm:
        """What the answer may be."""
        tools = [tool(name, one.description, _parameters(one)) for name, _, one in _functions(self.tools or ())]
        given, choice, several = self.text.format, self.tool_choice, self.parallel_tool_calls
        schema = None if given.type == "text" else given.schema_ or {"type": "object"}
        if isinstance(choice, ChosenTool):
            return AnswerForm(tools, "required", [choice.name], False, schema, "text.format")
        if isinstance(choice, AllowedTools):
            allowed = [one.name for one in choice.tools]
            return AnswerForm(tools, choice.mode, allowed, several, schema, "text.format")
        return AnswerForm(tools, choice, None, several, schema, "text.format")

    def reply(self, context: Context) -> Reply:
        """Return the reply."""
        return ResponseReply(context, self, self._records if self.store else None)


def _functions(tools: Sequence[Any]) -> Iterator[tuple[str, str | None, FunctionTool]]:
    """Yield the name for the model of each function, its namespace, and the function."""
    for one in tools:
        if isinstance(one, FunctionTool):
            yield one.name, None, one
        elif isinstance(one, Namespace):
            yield from ((_full(one.name, inner.name), one.name, inner) for inner in one.tools)


def _parameters(given: FunctionTool) -> dict[str, Any]:
    if given.type == "function":
        return given.parameters
    return {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
            "additionalProperties": False}  # fmt: skip


# -- replies ----------------------------------------------------------------------------------------------

Events = Iterator[tuple[str, dict[str, Any]]]
"""The types of server-sent events, and their fields."""


class ResponseReply:
    """The reply of a request. records: where it is recorded by its id; None: it is not."""

    def __init__(self, context: Context, request: ResponseRequest, records: OwnerRecords | None) -> None:
        self._context, self._records = context, records
        self._parts = AnswerParts(context, request.calls())
        self._functions = {name: (space, one) for name, space, one in _functions(request.tools or ())}
        self._items = list[dict[str, Any]]()
        """The items of the output; the last one may be incomplete."""
        self._arguments = ""
        """The arguments of the last call so far."""
        self._messages, self._previous = request.messages(), request.previous_response_id
        choice = request.tool_choice
        self._head: dict[str, Any] = {
            "id": f"resp_{context.id}", "object": "response", "created_at": int(time.time()), "model": context.model,
            "instructions": request.instructions, "metadata": {}, "previous_response_id": self._previous,
            "parallel_tool_calls": request.parallel_tool_calls, "temperature": request.temperature,
            "top_p": request.top_p, "max_output_tokens": request.max_output_tokens, "store": request.store,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [_described(one, space) for name, (space, one) in self._functions.items()],
            "text": {"format": request.text.format.model_dump(exclude_none=True, by_alias=True)},
            "truncation": "disabled", "error": None, "incomplete_details": None, "usage": None,
        }  # fmt: skip
        self._left_out = [one.type for one in request.tools or () if isinstance(one, HostedTool)]

    # -- output -------------------------------------------------------------------------------------------

    def _add(self, part: Part) -> Events:
        """Add a part of the answer to the output."""
        last = self._items[-1] if self._items and self._items[-1]["status"] == "in_progress" else None
        kind = "message" if isinstance(part, str) else "reasoning" if isinstance(part, Reasoning) else "call"
        if last is None or _kind(last) != kind or (isinstance(part, CallPart) and part.name):
            yield from self._close()
            last = self._begin(part)
            yield "output_item.added", {"item": {**last, "content": []} if "content" in last else {**last}}
            if "content" in last:
                yield "content_part.added", {"item_id": last["id"], "content_index": 0, "part": last["content"][0]}
        known = {"item_id": last["id"], "content_index": 0}
        if isinstance(part, str):
            last["content"][0] = _output_text(last["content"][0]["text"] + part)
            yield "output_text.delta", known | {"delta": part, "logprobs": []}
        elif isinstance(part, Reasoning):
            last["content"][0] = _reasoning_text(last["content"][0]["text"] + part.text)
            yield "reasoning_text.delta", known | {"delta": part.text}
        elif part.arguments:
            self._arguments += part.arguments
            if last["type"] == "function_call":
                yield "function_call_arguments.delta", {"item_id": last["id"], "delta": part.arguments}

    def _begin(self, part: Part) -> dict[str, Any]:
        """Begin an item of the output."""
        item: dict[str, Any]
        if isinstance(part, str):
            item = {"id": _new("msg"), "type": "message", "role": "assistant", "content": [_output_text("")]}
        elif isinstance(part, Reasoning):
            item = {"id": _new("rs"), "type": "reasoning", "summary": [], "content": [_reasoning_text("")]}
        else:
            space, function = self._functions[part.name]
            named = {"name": function.name} | ({} if space is None else {"namespace": space})
            item = {"id": _new("fc"), "call_id": self._parts.begun(part).id, **named, **(
                {"type": "function_call", "arguments": ""} if function.type == "function" else
                {"type": "custom_tool_call", "input": ""}
            )}  # fmt: skip
            self._arguments = ""
        self._items.append(item | {"status": "in_progress"})
        return self._items[-1]

    def _close(self, status: str = "completed") -> Events:
        """End the last item of the output, if it has not ended."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"], known = status, {"item_id": item["id"]}
        if "content" in item:
            (part,) = item["content"]
            logprobs: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            yield f"{part['type']}.done", known | {"content_index": 0, "text": part["text"]} | logprobs
            yield "content_part.done", known | {"content_index": 0, "part": part}
        elif item["type"] == "function_call":
            item["arguments"] = self._arguments
            yield "function_call_arguments.done", known | {"name": item["name"], "arguments": self._arguments}
        else:
            item["input"] = _input(self._arguments)
            yield "custom_tool_call_input.delta", known | {"delta": item["input"]}
            yield "custom_tool_call_input.done", known | {"input": item["input"]}
        yield "output_item.done", {"item": item}

    def _end(self, answer: Finished) -> dict[str, Any]:
        """Return the response of a complete answer."""
        found = self._head | {"output": self._items, "usage": usage(answer), "status": "completed"}
        if answer.reason != "stop":
            found |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        kinds = ", ".join(dict.fromkeys(self._left_out))
        notes = [f"Tools of these types are left out, because this server cannot run them: {kinds}."] if kinds else []
        return found | {"completed_at": int(time.time())} | self._context.extension(answer, notes)

    def _keep(self, response: dict[str, Any]) -> None:
        """Record a response. A worker thread calls this."""
        if self._records is not None:
            items = [_ITEMS[one["type"]].model_validate(one) for one in self._items]
            messages = [*self._messages, *_messages(items)]
            self._records.put(response["id"], {"previous": self._previous, "messages": messages, "response": response})

    def complete(self, events: Sequence[StreamEvent]) -> dict[str, Any]:
        """Return the response as one object. Raises the error that ended it."""
        last = ended(events)
        for part in self._parts.all(last):
            deque(self._add(part), 0)
        deque(self._close("completed" if last.reason == "stop" else "incomplete"), 0)
        response = self._end(last)
        self._keep(response)
        return response

    async def stream(self, events: AsyncIterator[StreamEvent | Progress]) -> AsyncIterator[str]:
        """Yield the response as server-sent events. Progress is a comment."""
        number = 0

        def sent(kind: str, fields: dict[str, Any]) -> str:
            nonlocal number
            if "item" in fields or "item_id" in fields:
                fields = {"output_index": len(self._items) - 1, **fields}
            event = server_sent({"type": f"response.{kind}", "sequence_number": number, **fields}, f"response.{kind}")
            number += 1
            return event

        begun = self._head | {"output": [], "status": "in_progress"}
        yield sent("created", {"response": begun})
        yield sent("in_progress", {"response": begun})
        async for event in events:
            if isinstance(event, Progress):
                yield event.comment
            elif isinstance(event, Exception):
                error = self._context.to_error(event)
                failed = {"status": "failed", "error": {"code": error.code or error.kind, "message": error.detail}}
                yield sent("failed", {"response": begun | failed})
            else:
                for part in self._parts.add(event):
                    for kind, fields in self._add(part):
                        yield sent(kind, fields)
            if isinstance(event, Finished):
                for kind, fields in self._close("completed" if event.reason == "stop" else "incomplete"):
                    yield sent(kind, fields)
                response = self._end(event)
                await asyncio.to_thread(self._keep, response)
                yield sent(response["status"], {"response": response})


_ITEMS: dict[str, type[Item]] = {
    "message": MessageItem, "function_call": FunctionCall, "custom_tool_call": CustomCall, "reasoning": ReasoningItem,
}  # fmt: skip


def _kind(item: Mapping[str, Any]) -> str:
    return item["type"] if item["type"] in ("message", "reasoning") else "call"


def _new(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_text(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _described(one: FunctionTool, space: str | None) -> dict[str, Any]:
    """Return a tool as a response repeats it."""
    found: dict[str, Any] = {"type": one.type, "name": one.name, "description": one.description}
    return found | ({"parameters": one.parameters, "strict": False} if one.type == "function" else {})


def _input(arguments: str) -> str:
    """Return the text that a custom tool is called with; an answer may be cut off within it."""
    try:
        return str(json.loads(arguments)["input"])
    except (ValueError, KeyError, TypeError):
        return ""


def usage(answer: Finished) -> dict[str, Any]:
    """Return the numbers of tokens; cached tokens were not read again."""
    prompt = answer.cached + answer.read
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": answer.cached, "cache_write_tokens": 0},
        "output_tokens": answer.written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + answer.written,
    }
