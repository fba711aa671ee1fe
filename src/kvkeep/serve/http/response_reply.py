"""The replies of OpenAI's responses, and their records."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from kvkeep.blocks.records import OwnerRecords
from kvkeep.decode.answer_form import Calls
from kvkeep.decode.answer_reader import CallPart, Part, Reasoning
from kvkeep.serve.http.conversation import AnswerParts, ended
from kvkeep.serve.http.protocol import Context, Progress, StreamEvent, server_sent
from kvkeep.serve.http.response_items import FunctionTool, HostedTool, functions
from kvkeep.serve.session import Finished

Events = Iterator[tuple[str, dict[str, Any]]]
"""The types of server-sent events, and their fields."""


class ResponseReply:
    """The reply of a request. request: its fields as a response repeats them. messages: those of its input. calls:
    those that the answer may have, of ``tools``. answered: converts the answer to a message. records: where the
    response is recorded by its id; None: it is not."""

    def __init__(
        self,
        context: Context,
        request: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        calls: Calls,
        tools: Sequence[Any],
        answered: Callable[[Finished], Mapping[str, Any]],
        records: OwnerRecords | None,
    ) -> None:
        self._answered = answered
        self._context, self._records, self._messages = context, records, messages
        self._parts, self._previous = AnswerParts(context, calls), request["previous_response_id"]
        self._functions = {name: (space, one) for name, space, one in functions(tools)}
        self._items = list[dict[str, Any]]()
        """The items of the output; the last one may be incomplete."""
        self._arguments = ""
        """The arguments of the last call so far."""
        self._head: dict[str, Any] = {
            "id": f"resp_{context.id}", "object": "response", "created_at": int(time.time()), "model": context.model,
            **request, "tools": [_described(one) for _, one in self._functions.values()], "metadata": {},
            "truncation": "disabled", "error": None, "incomplete_details": None, "usage": None,
        }  # fmt: skip
        self._left_out = [one.type for one in tools if isinstance(one, HostedTool)]

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

    def _keep(self, response: dict[str, Any], answer: Finished) -> None:
        """Record a response. A worker thread calls this."""
        if self._records is not None:
            messages = [*self._messages, self._answered(answer)]
            self._records.put(response["id"], {"previous": self._previous, "messages": messages, "response": response})

    def complete(self, events: Sequence[StreamEvent]) -> dict[str, Any]:
        """Return the response as one object. Raises the error that ended it."""
        last = ended(events)
        for part in self._parts.all(last):
            deque(self._add(part), 0)
        deque(self._close("completed" if last.reason == "stop" else "incomplete"), 0)
        response = self._end(last)
        self._keep(response, last)
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
                await asyncio.to_thread(self._keep, response, event)
                yield sent(response["status"], {"response": response})


def _kind(item: Mapping[str, Any]) -> str:
    return item["type"] if item["type"] in ("message", "reasoning") else "call"


def _new(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_text(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _described(one: FunctionTool) -> dict[str, Any]:
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
        "output_tokens_details": {"reasoning_tokens": answer.reasoning},
        "total_tokens": prompt + answer.written,
    }
