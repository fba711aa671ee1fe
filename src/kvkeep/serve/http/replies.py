"""Events of the engine as OpenAI's objects, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import accumulate
from typing import Any

from kvkeep.serve.answer import Piece, Told
from kvkeep.serve.http.asked import News
from kvkeep.serve.http.errors import Refused, refused
from kvkeep.serve.job import Ended


class Reply:
    """One answer on its way. chat: of a conversation, else of a text. told: whether probabilities are. refuse: how an
    error in mid-stream is told."""

    def __init__(self, model: str, chat: bool, told: bool, refuse: Callable[[Exception], Refused] = refused) -> None:
        self.chat, self.told, self.refuse = chat, told, refuse
        self._offset = 0  # characters of the text whose tokens are told
        kind = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
        self.head = {"id": f"{kind[0]}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.kind = kind[1]

    def whole(self, events: Sequence[News]) -> dict[str, Any]:
        """Return the answer as one object. Raises the error that it ended by."""
        last = events[-1]
        if isinstance(last, Exception):
            raise last
        assert isinstance(last, Ended)
        told = [one for event in events if isinstance(event, Piece) for one in event.told]
        body: dict[str, Any] = {"index": 0, "finish_reason": _reason(last)}
        body |= {"message": {"role": "assistant", "content": last.text}} if self.chat else {"text": last.text}
        body["logprobs"] = self._logprobs(told) if self.told else None
        return self.head | {"object": self.kind, "choices": [body], "usage": usage(last)}

    async def stream(self, events: AsyncIterator[News | None], with_usage: bool) -> AsyncIterator[str]:
        """Yield the answer as server-sent events; an error is an object like any other, and None a comment."""
        if self.chat:
            yield self._chunk({"delta": {"role": "assistant", "content": ""}})
        async for event in events:
            if isinstance(event, Piece):
                own: dict[str, Any] = {"delta": {"content": event.text}} if self.chat else {"text": event.text}
                yield self._chunk(own | ({"logprobs": self._logprobs(event.told)} if self.told else {}))
            elif isinstance(event, Ended):
                yield self._chunk({"delta": {}} if self.chat else {"text": ""}, _reason(event))
                if with_usage:
                    yield _event(self.head | {"object": self._object, "choices": [], "usage": usage(event)})
            elif event is None:
                yield ": the prompt is being read\n\n"
            else:
                yield _event(self.refuse(event).body())
        yield "data: [DONE]\n\n"

    @property
    def _object(self) -> str:
        return self.kind + (".chunk" if self.chat else "")

    def _chunk(self, own: dict[str, Any], reason: str | None = None) -> str:
        return _event(self.head | {"object": self._object, "choices": [{"index": 0, **own, "finish_reason": reason}]})

    def _logprobs(self, told: Sequence[Told]) -> dict[str, Any]:
        if self.chat:
            return {"content": [_token(one.text, one.logprob) | _likeliest(one) for one in told]}
        offsets = [*accumulate((len(one.text) for one in told), initial=self._offset)]
        self._offset = offsets[-1]
        return {
            "tokens": [one.text for one in told],
            "token_logprobs": [one.logprob for one in told],
            "top_logprobs": [{text: value for _, text, value in one.likeliest} for one in told],
            "text_offset": offsets[:-1],
        }


def _likeliest(told: Told) -> dict[str, Any]:
    return {"top_logprobs": [_token(text, value) for _, text, value in told.likeliest]}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}


def usage(ended: Ended) -> dict[str, Any]:
    """Return the numbers of tokens, of the prompt those that were not read again."""
    prompt = ended.cached + ended.read
    return {
        "prompt_tokens": prompt,
        "completion_tokens": ended.written,
        "total_tokens": prompt + ended.written,
        "prompt_tokens_details": {"cached_tokens": ended.cached},
    }


def _reason(ended: Ended) -> str:
    """Return how an answer ended; one that was cut off, by the time or by the server's end, did so by its length."""
    return "stop" if ended.reason == "stop" else "length"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
