"""OpenAI's completions of conversations and of texts, and ``/tokenize``: the fields of requests, and replies."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from kvkeep.engine.grammar import of_schema
from kvkeep.engine.pieces import TextPiece, TokenLogprob
from kvkeep.engine.token_spelling import spelt
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.protocol import (
    AnswerRequest,
    ChatPrompt,
    Name,
    Prompt,
    Reply,
    StreamEvent,
    Strict,
    Text,
    wrong,
)
from kvkeep.serve.session import Finished

_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Characters at which clients that read lines cut an event, and that JSON does not escape by itself."""
MAX_MESSAGES, MAX_PARTS = 10_000, 1000
"""Messages of a request, and text parts of one message."""


def _no_tool(role: Any) -> Any:
    if role in ("tool", "function"):
        raise wrong(f"tools are not supported; send what the {role} returned as text in a message of the role 'user'")
    return role


def _one_prompt(given: Any) -> Any:
    """Return the prompt of a list of one, as clients send it."""
    if not isinstance(given, list) or not given or not isinstance(given[0], str | list):
        return given
    if len(given) > 1:
        raise wrong(f"it has {len(given)} prompts; send one prompt at a time")
    return given[0]


class TextPart(Strict):
    """A text part of a message; no other kind of part is supported."""

    type: Literal["text"]
    text: Text


class JsonSchema(Strict):
    """A JSON Schema with a name."""

    name: Name
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict)
    description: Text | None = None
    strict: bool = False
    """Answers always obey the schema."""


class ResponseFormat(Strict):
    """The form of an answer: a JSON object, or JSON with a schema."""

    type: Literal["json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _with_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") is not (self.json_schema is not None):
            raise wrong("'json_schema' belongs to the type 'json_schema', and to no other")
        return self


class Message(Strict):
    """A message of a conversation. An answer without a content is empty."""

    void: ClassVar[Mapping[str, Sequence[Any]]] = {"tool_calls": ([],), "annotations": ([],)}

    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_no_tool)]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)]
    name: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _empty_answer(cls, given: Any) -> Any:
        """Complete an answer whose content is null, as clients send it."""
        answers = isinstance(given, dict) and given.get("role") == "assistant" and given.get("content") is None
        return given | {"content": ""} if answers else given

    @property
    def text(self) -> str:
        """The text of all parts."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates take it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class ChatRequest(AnswerRequest):
    """``POST /v1/chat/completions``."""

    void: ClassVar[Mapping[str, Sequence[Any]]] = {
        **AnswerRequest.void,
        "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},), "modalities": (["text"],),
    }  # fmt: skip

    messages: Annotated[Messages, Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """OpenAI's newer name of ``max_tokens``."""
    continue_final_message: bool = False
    """Continue the last message, which is an answer."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    response_format: ResponseFormat | None = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_number(cls, given: int, known: ValidationInfo) -> int:
        if known.data.get("max_tokens") is not None:
            raise wrong("'max_tokens' means the same; leave one of them out")
        return given

    @field_validator("continue_final_message")
    @classmethod
    def _of_an_answer(cls, given: bool, known: ValidationInfo) -> bool:
        messages = known.data.get("messages", [])
        if given and messages and (len(messages) < 2 or messages[-1].role != "assistant"):
            raise wrong("the last message has to be an answer (role 'assistant') to an earlier message")
        return given

    @field_validator("response_format")
    @classmethod
    def _the_only_form(cls, given: ResponseFormat, known: ValidationInfo) -> ResponseFormat:
        extension = known.data.get("kvkeep")
        if extension is not None and (extension.regex or extension.grammar):
            raise wrong("'kvkeep' also gives the answer a form; leave one of them out")
        return given

    @field_validator("top_logprobs")
    @classmethod
    def _of_probabilities(cls, given: int, known: ValidationInfo) -> int:
        if given and known.data.get("logprobs") is False:
            raise wrong("it needs 'logprobs': true; add that, or leave it out")
        return given

    def given(self) -> Prompt:
        """Return the conversation up to its answer, or to the end of a last message to be continued."""
        messages = [one.plain() for one in self.messages]
        if not self.continue_final_message:
            return ChatPrompt(messages)
        return ChatPrompt(messages[:-1], messages[-1]["content"])

    @property
    def token_limit(self) -> int | None:
        """The maximum number of tokens of the answer, if the request sets one."""
        return self.max_completion_tokens or self.max_tokens

    def form(self) -> tuple[str, Callable[[], str]] | None:
        """Return the form of the answer, as :meth:`AnswerRequest.form`."""
        if self.response_format is None:
            return super().form()
        schema = self.response_format.json_schema
        return "response_format", partial(of_schema, {"type": "object"} if schema is None else schema.schema_)

    @property
    def logprob_count(self) -> int | None:
        """The number of likeliest tokens reported with each token; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    def reply(self, model: str, to_error: Callable[[Exception], APIError]) -> Reply:
        """Return the reply."""
        return Choices(model, True, self.logprobs, self.usage_in_stream, to_error)


class TextRequest(AnswerRequest):
    """``POST /v1/completions``."""

    void: ClassVar[Mapping[str, Sequence[Any]]] = {
        **AnswerRequest.void,
        "suffix": ("",),
        "best_of": (1,),
        "echo": (False,),
    }

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """The maximum number of tokens of the answer; 0: the prompt is only read."""
    prompt: Annotated[Text | Annotated[list[int], Field(fail_fast=True, min_length=1)], BeforeValidator(_one_prompt)]
    """A text, a list of token ids, or a list with one prompt of either kind."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def given(self) -> Prompt:
        """Return the text, or the ids."""
        return self.prompt

    @property
    def logprob_count(self) -> int | None:
        """The number of likeliest tokens reported with each token; None: no log-probabilities."""
        return self.logprobs

    def reply(self, model: str, to_error: Callable[[Exception], APIError]) -> Reply:
        """Return the reply."""
        return Choices(model, False, self.logprobs is not None, self.usage_in_stream, to_error)


class TokenizeRequest(Strict):
    """``POST /tokenize``: a text (``prompt``), or a conversation up to its answer (``messages``)."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None

    @field_validator("messages")
    @classmethod
    def _one_of_both(cls, given: list[Message] | None, known: ValidationInfo) -> list[Message] | None:
        if given is not None and known.data.get("prompt") is not None:
            raise wrong("the request also has a 'prompt'; leave one of them out")
        return given

    def given(self) -> Prompt:
        """Return the text, or the conversation; an empty text if there is neither."""
        if self.messages:
            return ChatPrompt([one.plain() for one in self.messages])
        return self.prompt or ""


# -- replies ----------------------------------------------------------------------------------------------


class Choices:
    """The reply of a request, with one choice. chat: whether it answers a conversation; otherwise it continues a text.
    logprobs: whether it has log-probabilities. with_usage: whether a stream has the numbers of tokens. to_error:
    converts an exception within a stream to an error."""

    def __init__(
        self, model: str, chat: bool, logprobs: bool, with_usage: bool, to_error: Callable[[Exception], APIError]
    ) -> None:
        self._chat, self._logprobs, self._with_usage, self._to_error = chat, logprobs, with_usage, to_error
        self._offset = 0  # characters of the text whose tokens were sent
        prefix, self._kind = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
        self._chunk_kind = f"{self._kind}.chunk" if chat else self._kind
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def complete(self, events: Sequence[StreamEvent]) -> dict[str, Any]:
        """Return the answer as one object. Raises the error that ended it."""
        last = events[-1]
        if isinstance(last, Exception):
            raise last
        assert isinstance(last, Finished)
        tokens = [one for event in events if isinstance(event, TextPiece) for one in event.logprobs]
        choice: dict[str, Any] = {"index": 0, "finish_reason": _reason(last)}
        choice |= {"message": {"role": "assistant", "content": last.text}} if self._chat else {"text": last.text}
        choice["logprobs"] = self._probabilities(tokens) if self._logprobs else None
        return self._head | {"object": self._kind, "choices": [choice], "usage": usage(last)}

    async def stream(self, events: AsyncIterator[StreamEvent | None]) -> AsyncIterator[str]:
        """Yield the answer as server-sent events. An error is an object, and None is a comment."""
        if self._chat:
            yield self._chunk({"delta": {"role": "assistant", "content": ""}})
        async for event in events:
            if isinstance(event, TextPiece):
                fields: dict[str, Any] = {"delta": {"content": event.text}} if self._chat else {"text": event.text}
                yield self._chunk(
                    fields | ({"logprobs": self._probabilities(event.logprobs)} if self._logprobs else {})
                )
            elif isinstance(event, Finished):
                yield self._chunk({"delta": {}} if self._chat else {"text": ""}, _reason(event))
                if self._with_usage:
                    yield _event(self._head | {"object": self._chunk_kind, "choices": [], "usage": usage(event)})
            elif event is None:
                yield ": the prompt is being read\n\n"
            else:
                yield _event(self._to_error(event).body())
        yield "data: [DONE]\n\n"

    def _chunk(self, fields: dict[str, Any], reason: str | None = None) -> str:
        choice = {"index": 0, **fields, "finish_reason": reason}
        body = self._head | {"object": self._chunk_kind, "choices": [choice]}
        return _event(body | ({"usage": None} if self._with_usage else {}))

    def _probabilities(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._chat:
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
    """Return the numbers of tokens; cached tokens were not read again. For a text past
    its exact part, include the length of this part; if the oldest entries were dropped, include their number."""
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
