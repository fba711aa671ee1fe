"""The replies of OpenAI's completions of conversations and of texts: an answer is a choice."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from kvkeep.decode.answer_reader import Part, Reasoning
from kvkeep.engine.pieces import TextPiece, TokenLogprob
from kvkeep.engine.token_spelling import spelt
from kvkeep.serve.http.conversation import AnswerCall, AnswerParts, ended, message_of
from kvkeep.serve.http.protocol import Context, Progress, StreamEvent, server_sent
from kvkeep.serve.session import Finished

NOTHING: Mapping[str, Any] = MappingProxyType({})


class CompletionReply:
    """The reply with one answer to a request: one choice of ``count``. usage: whether a stream ends with the
    numbers of tokens. logprobs: whether there are log-probabilities. parts: those of
    an answer of a conversation; None: it continues a text."""

    def __init__(
        self, context: Context, count: int, usage: bool, logprobs: bool, parts: AnswerParts | None = None
    ) -> None:
        self._parts, self._context = parts, context
        self._count, self._with_usage, self._logprobs = count, usage, logprobs
        self._offset = 0  # characters of the text whose tokens were sent
        self._nothing: dict[str, Any] = {"delta": {}} if parts else {"text": ""}
        prefix, self._kind = ("chatcmpl", "chat.completion") if parts else ("cmpl", "text_completion")
        self._chunk_kind = f"{self._kind}.chunk" if parts else self._kind
        self._head = {"id": f"{prefix}-{context.id}", "created": int(time.time()), "model": context.model}

    def complete(self, events: Sequence[StreamEvent]) -> dict[str, Any]:
        """Return the answer as one object. Raises the error that ended it."""
        last = ended(events)
        tokens = [one for event in events if isinstance(event, TextPiece) for one in event.logprobs]
        choice: dict[str, Any] = {"text": last.text}
        if self._parts is not None:
            message = message_of(self._parts.joined(last), _call)
            message["content"] = message["content"] or (None if "tool_calls" in message else "")
            choice = {"message": message}
        choice |= {"index": self._context.index, "finish_reason": self._reason(last)}
        choice["logprobs"] = self._probabilities(tokens) if self._logprobs else None
        self._context.ended.append(last)
        found = {"object": self._kind, "choices": [choice], "usage": usage(self._context.ended)}
        return self._head | found | self._context.extension(last)

    def _reason(self, answer: Finished) -> str:
        """Return the finish reason: "length" also if the time limit or the server's end cut the answer off."""
        if answer.reason != "stop":
            return "length"
        return "tool_calls" if self._parts is not None and self._parts.calls else "stop"

    async def stream(self, events: AsyncIterator[StreamEvent | Progress]) -> AsyncIterator[str]:
        """Yield the answer as server-sent events. An error is an object, and progress is a comment."""
        if self._parts is not None:
            yield self._chunk({"delta": {"role": "assistant", "content": ""}})
        ends = list[Finished | Exception]()
        async for event in events:
            if isinstance(event, TextPiece):
                shown = {"logprobs": self._probabilities(event.logprobs)} if self._logprobs else {}
                fields = self._deltas(event) or ([self._nothing] if shown else [])
                for number, one in enumerate(fields):
                    yield self._chunk(one if number else one | shown)
            elif isinstance(event, Finished):
                for one in self._deltas(event):
                    yield self._chunk(one)
                ends.append(event)
                yield self._chunk(self._nothing, self._reason(event), self._context.extension(event))
            elif isinstance(event, Progress):
                yield event.comment
            else:
                ends.append(event)
                yield server_sent(self._context.to_error(event).body())
        # Added only now, with no yield before the count is read, so only one stream is the last.
        self._context.ended.extend(ends)
        if len(self._context.ended) < self._count:
            return
        if self._with_usage and any(isinstance(one, Finished) for one in self._context.ended):
            last = {"object": self._chunk_kind, "choices": [], "usage": usage(self._context.ended)}
            yield server_sent(self._head | last)
        yield "data: [DONE]\n\n"

    def _deltas(self, event: TextPiece | Finished) -> list[dict[str, Any]]:
        """Return the next parts of a stream."""
        if self._parts is not None:
            return [self._delta(one) for one in self._parts.add(event)]
        return [{"text": event.text}] if isinstance(event, TextPiece) else []

    def _delta(self, part: Part) -> dict[str, Any]:
        if isinstance(part, str):
            return {"delta": {"content": part}}
        if isinstance(part, Reasoning):
            return {"delta": {"reasoning_content": part.text}}
        assert self._parts is not None
        call = _call(self._parts.begun(part)) if part.name else {"function": {"arguments": part.arguments}}
        return {"delta": {"tool_calls": [{"index": part.index, **call}]}}

    def _chunk(self, fields: dict[str, Any], reason: str | None = None, report: Mapping[str, Any] = NOTHING) -> str:
        choice = {"index": self._context.index, **fields, "finish_reason": reason}
        body = self._head | {"object": self._chunk_kind, "choices": [choice], **report}
        return server_sent(body | ({"usage": None} if self._with_usage else {}))

    def _probabilities(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._parts is not None:
            return {"content": [_token(one.data, one.logprob) | _top(one) for one in tokens]}
        offsets = [*accumulate((len(one.text) for one in tokens), initial=self._offset)]
        self._offset = offsets[-1]
        return {
            "tokens": [spelt(one.data) for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{spelt(data): value for _, data, value in one.top} for one in tokens],
            "text_offset": offsets[:-1],
        }


def _top(token: TokenLogprob) -> dict[str, Any]:
    return {"top_logprobs": [_token(data, value) for _, data, value in token.top]}


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": spelt(data), "logprob": logprob, "bytes": [*data]}


def usage(ends: Sequence[Finished | Exception]) -> dict[str, Any]:
    """Return the numbers of tokens of the answers to a request, by their ends; cached tokens were not read again. For a
    text past its exact part, include the part's length; if the oldest entries were dropped, include their number."""
    answers = [one for one in ends if isinstance(one, Finished)]
    answer, written = answers[0], sum(one.written for one in answers)
    prompt = answer.cached + answer.read
    limits = {"exact_tokens": answer.exact_tokens, "lost_tokens": answer.lost_tokens or None}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": answer.cached},
        "completion_tokens_details": {"reasoning_tokens": sum(one.reasoning for one in answers)},
        **{name: number for name, number in limits.items() if number is not None},
    }


def _call(call: AnswerCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
