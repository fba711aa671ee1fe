"""Events of the engine as OpenAI's objects, complete or as a stream of server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import accumulate
from typing import Any

from kvkeep.engine.answer import TextPiece, TokenLogprob
from kvkeep.engine.token_spelling import spelt
from kvkeep.serve.http.error_handlers import api_error
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.event_buffer import StreamEvent
from kvkeep.serve.job import Finished

_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Characters at which clients that read lines cut an event, and that JSON does not escape by itself."""


class Reply:
    """The reply to one request. chat: whether it answers a conversation; otherwise it continues a text. logprobs:
    whether it has log-probabilities. to_error: converts an exception within a stream to an error."""

    def __init__(
        self, model: str, chat: bool, logprobs: bool, to_error: Callable[[Exception], APIError] = api_error
    ) -> None:
        self.chat, self.logprobs, self.to_error = chat, logprobs, to_error
        self._offset = 0  # characters of the text whose tokens were sent
        self._in_chunks: dict[str, None] = {}  # fields of all chunks but the last one, which has the usage
        kind = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
        self.head = {"id": f"{kind[0]}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.kind = kind[1]

    def complete(self, events: Sequence[StreamEvent]) -> dict[str, Any]:
        """Return the answer as one object. Raises the error that ended it."""
        last = events[-1]
        if isinstance(last, Exception):
            raise last
        assert isinstance(last, Finished)
        tokens = [one for event in events if isinstance(event, TextPiece) for one in event.logprobs]
        body: dict[str, Any] = {"index": 0, "finish_reason": _reason(last)}
        body |= {"message": {"role": "assistant", "content": last.text}} if self.chat else {"text": last.text}
        body["logprobs"] = self._logprobs(tokens) if self.logprobs else None
        return self.head | {"object": self.kind, "choices": [body], "usage": usage(last)}

    async def stream(self, events: AsyncIterator[StreamEvent | None], with_usage: bool) -> AsyncIterator[str]:
        """Yield the answer as server-sent events. An error is an object, and None is a comment."""
        self._in_chunks = {"usage": None} if with_usage else {}
        if self.chat:
            yield self._chunk({"delta": {"role": "assistant", "content": ""}})
        async for event in events:
            if isinstance(event, TextPiece):
                fields: dict[str, Any] = {"delta": {"content": event.text}} if self.chat else {"text": event.text}
                yield self._chunk(fields | ({"logprobs": self._logprobs(event.logprobs)} if self.logprobs else {}))
            elif isinstance(event, Finished):
                yield self._chunk({"delta": {}} if self.chat else {"text": ""}, _reason(event))
                if with_usage:
                    yield _event(self.head | {"object": self._object, "choices": [], "usage": usage(event)})
            elif event is None:
                yield ": the prompt is being read\n\n"
            else:
                yield _event(self.to_error(event).body())
        yield "data: [DONE]\n\n"

    @property
    def _object(self) -> str:
        return self.kind + (".chunk" if self.chat else "")

    def _chunk(self, fields: dict[str, Any], reason: str | None = None) -> str:
        choice = {"index": 0, **fields, "finish_reason": reason}
        return _event(self.head | {"object": self._object, "choices": [choice]} | self._in_chunks)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self.chat:
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


def usage(answer: Finished) -> dict[str, Any]:
    """Return the numbers of tokens; cached tokens were not read again. A text that is no longer exact has the number of
    its first tokens up to which it was, and one whose oldest entries are dropped has their number."""
    prompt = answer.cached + answer.read
    limits = {"exact_tokens": answer.exact_tokens, "lost_tokens": answer.lost_tokens or None}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer.written,
        "total_tokens": prompt + answer.written,
        "prompt_tokens_details": {"cached_tokens": answer.cached},
        **{name: number for name, number in limits.items() if number is not None},
    }


def _reason(answer: Finished) -> str:
    """Return the finish reason. An answer cut off by the time limit or the server's end has the reason "length"."""
    return "stop" if answer.reason == "stop" else "length"


def _event(body: dict[str, Any]) -> str:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text.translate(_LINE_ENDS)}\n\n"
