"""Plays a day against a server, as an agent's client does, and records each request."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from kvkeep_lab.agent_day.day import MAIN, Day, DayRequest
from kvkeep_lab.agent_day.prefixes import Prefixes
from kvkeep_lab.agent_day.records import Answered, DayRecords, Repeated, Started
from kvkeep_lab.peers.servers import Running, Server

TIMEOUT_S = 3600.0
"""Seconds of the longest request: a slow server reads the start in some of them."""
IDLE_S = 2.0
"""Seconds from an answer to the kill. In this time a server can store what it has read; agents run tools in it."""
NO_ANSWER = "(no answer)"
"""The content of an answer that failed, or is a call that was cut off."""
DONE = "Done."
"""The result of a call that the day does not plan."""


class DayPlayer:
    """Plays a day. records: the requests that were played before, to which new ones are added. say: called with a line
    for each request."""

    def __init__(self, day: Day, prefixes: Prefixes, records: DayRecords, say: Callable[[str], None]) -> None:
        self._day, self._prefixes, self._records, self._say = day, prefixes, records, say
        self._messages: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._last: tuple[str, list[dict[str, Any]]] | None = None  # the main agent's last conversation and prompt
        for one in records.answers:
            request = day.requests[one.number]
            self._finish(request, self._prompt(request), one)

    def play(self, server: Server, keeps: bool) -> None:
        """Play the requests that are left, and kill the server where the day does; send the last prompt of the main
        agent again. keeps: the server has it also after another start. Raises KvkeepError if the server does not start,
        StoreError if the records cannot be written."""
        killed, end = self._day.killed, len(self._day.requests)
        for part in (range(killed), range(killed, end)):
            left = part[max(0, len(self._records.answers) - part.start) :]
            if not left:
                continue
            with _started(server) as (running, seconds):
                self._records.started(Started(left.start, left.start == killed, seconds))
                for number in left:
                    self._records.answered(self._answered(server, running, self._day.requests[number]))
                if left.stop < end:
                    time.sleep(IDLE_S)
                    running.kill()
                else:
                    self._repeat(server, running, restarted=False)
        if keeps and self._records.repeated_s(True) is None:
            with _started(server) as (running, _):
                self._repeat(server, running, restarted=True)
                if self._records.repeated_s(False) is None:
                    self._repeat(server, running, restarted=False)

    def _repeat(self, server: Server, running: Running, restarted: bool) -> None:
        """Send the main agent's last prompt again, and record the time to the first token of an answer."""
        assert self._last is not None
        conversation, messages = self._last
        tools = [*self._day.conversations[conversation].tools]
        body = {"messages": messages, "max_tokens": 1, "temperature": 0, "tools": tools, "tool_choice": "auto"}
        given = _ask(f"{running.url}", server.model, body)
        if not given.get("error"):
            self._records.repeated(Repeated(restarted, given["prompt"], given["cached"], given["first_s"]))

    def _answered(self, server: Server, running: Running, request: DayRequest) -> Answered:
        """Return a request's record."""
        messages = self._prompt(request)
        conversation = self._day.conversations[request.conversation]
        ids = self._prefixes.ids(messages, conversation.tools)
        reusable = self._prefixes.reusable(ids)
        body: dict[str, Any] = {"messages": messages, "max_tokens": request.max_tokens, "temperature": 0}
        if conversation.tools:
            choice = "required" if request.kind == "call" else "auto"
            body |= {"tools": [*conversation.tools], "tool_choice": choice, "parallel_tool_calls": False}
        given = _ask(f"{running.url}", server.model, body)
        prompt = given.get("prompt", 0)
        # templates are filled differently, but what follows the reusable tokens has few differences
        given["reusable"] = max(0, prompt - (len(ids) - reusable)) if reusable else 0
        given |= {"peak_bytes": running.peak(), "anonymous_bytes": running.anonymous()}
        one = Answered(request.number, request.conversation, request.kind, **given)
        self._finish(request, messages, one)
        result = (
            one.error or f"read {one.read:,} of {one.prompt:,}, {one.again:,} again, first {one.first_s or 0:.2f} s"
        )
        self._say(f"{server.name} {one.number + 1}/{len(self._day.requests)} {one.conversation}, {one.kind}: {result}")
        return one

    def _prompt(self, request: DayRequest) -> list[dict[str, Any]]:
        """Return the messages of a request. Every call before it gets a result: the first one the planned result."""
        messages = self._messages[request.conversation]
        if not messages:
            messages = [self._day.conversations[request.conversation].system]
        calls = [call["id"] for call in messages[-1].get("tool_calls") or ()]
        planned = request.is_result and bool(calls)
        results = [request.text, *[DONE] * len(calls[1:])] if planned else [DONE] * len(calls)
        found = [*messages, *(_result(*each) for each in zip(calls, results, strict=True))]
        return found if planned else [*found, {"role": "user", "content": request.text}]

    def _finish(self, request: DayRequest, messages: list[dict[str, Any]], one: Answered) -> None:
        """Note the answer to a prompt: what its server has read, and what its client sends from now on. What follows
        reasoning has been read at positions that it does not get again."""
        tools, received = self._day.conversations[request.conversation].tools, _received(one.message)
        if not one.error:
            self._prefixes.add(messages, tools, None if "reasoning_content" in one.message else received)
        self._messages[request.conversation] = [*messages, _sent_back(request, received)]
        if request.conversation in MAIN:
            self._last = request.conversation, messages


def _result(call: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


def _received(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer's message without its reasoning, which clients drop, and without calls that were cut off."""
    calls = [*filter(_complete, answer.get("tool_calls") or ())]
    found = {"role": "assistant", "content": answer.get("content") or (None if calls else NO_ANSWER)}
    return found | ({"tool_calls": calls} if calls else {})


def _complete(call: Mapping[str, Any]) -> bool:
    with suppress(ValueError):
        return isinstance(json.loads(call["function"]["arguments"]), dict)
    return False


def _sent_back(request: DayRequest, received: dict[str, Any]) -> dict[str, Any]:
    """Return the message that the client sends back for an answer."""
    words = (received["content"] or "").split(" ")
    if request.kind != "reasoned" or received.get("tool_calls") or len(words) < 2:
        return received
    return received | {"content": " ".join(words[len(words) // 2 :])}


@contextmanager
def _started(server: Server) -> Iterator[tuple[Running, float]]:
    """Run a server; yield it, and the seconds until it can answer."""
    begin = time.perf_counter()
    with server.running() as running:
        yield running, time.perf_counter() - begin


def _ask(url: str, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Request an answer as a stream; return the fields of :class:`Answered` that it gives."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls, found = dict[int, dict[str, Any]](), dict[str, Any]({"message": message, "extra": {}})
    begin = time.perf_counter()
    try:
        stream = client.chat.completions.create(
            model=model, stream=True, stream_options={"include_usage": True}, **body
        )
        for chunk in stream:
            for choice in chunk.choices:
                delta = choice.delta.model_dump(exclude_none=True)
                reasoning, content, parts = (delta.get(key) for key in ("reasoning_content", "content", "tool_calls"))
                if "first_s" not in found and (reasoning or content or parts or choice.finish_reason):
                    found["first_s"] = time.perf_counter() - begin
                message["content"] += content or ""
                if reasoning:
                    message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
                for part in parts or ():
                    _add(calls, part)
                found["finish"] = choice.finish_reason or found.get("finish")
            found["extra"] |= chunk.model_extra or {}
            if chunk.usage is not None:
                found |= _counts(chunk.usage.model_dump(exclude_none=True), found["extra"])
    except openai.OpenAIError as error:
        found["error"] = f"{getattr(error, 'status_code', type(error).__name__)}: {error}"[:1000]
    finally:
        client.close()
    found["seconds"] = time.perf_counter() - begin
    if calls:
        message["tool_calls"] = [calls[place] for place in sorted(calls)]
    return found


def _counts(usage: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of tokens. llama.cpp's servers also say them in their timings."""
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens", (extra.get("timings") or {}).get("cache_n", 0))
    return {"prompt": usage["prompt_tokens"], "cached": cached, "written": usage["completion_tokens"]}


def _add(calls: dict[int, dict[str, Any]], part: Mapping[str, Any]) -> None:
    """Add a part of a stream to the calls by index."""
    known = calls.setdefault(part["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    known["id"] = part.get("id") or known["id"]
    for name, text in (part.get("function") or {}).items():
        known["function"][name] += text or ""
