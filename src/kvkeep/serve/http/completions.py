"""OpenAI's completions of conversations and of texts, and ``/tokenize``: the fields of requests, and replies."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from kvkeep.decode.answer_form import Answers
from kvkeep.decode.answer_format import AnswerFormat
from kvkeep.decode.answer_reader import Part, Reasoning
from kvkeep.engine.pieces import TextPiece, TokenLogprob
from kvkeep.engine.token_spelling import spelt
from kvkeep.serve.http.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
    AnswerCall,
    AnswerForm,
    AnswerParts,
    ConversationRequest,
    conversation,
    effort_variables,
    ended,
    text_of,
)
from kvkeep.serve.http.protocol import (
    MAX_STOPS,
    AnswerRequest,
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
    server_sent,
    wrong,
)
from kvkeep.serve.http.tools import NamedTool, ToolCall, Tools
from kvkeep.serve.session import Finished


def _no_function(role: Any) -> Any:
    if role == "function":
        raise wrong("functions are called tools now; send what it returned in a message of the role 'tool'")
    return role


def _one_prompt(given: Any) -> Any:
    """Return the prompt of a list of one, as clients send it."""
    if not isinstance(given, list) or not given or not isinstance(given[0], str | list):
        return given
    if len(given) > 1:
        raise wrong(f"it has {len(given)} prompts; send one prompt at a time")
    return given[0]


NOTHING: Mapping[str, Any] = MappingProxyType({})
MAX_ANSWERS = 16
"""Answers to one request."""
MAX_BIASES = 10_000
"""Tokens whose logits one request changes."""
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False
    """Send a final chunk with the token counts."""


class CompletionRequest(AnswerRequest):
    """The fields of both completions."""

    hints: ClassVar[frozenset[str]] = frozenset({
        "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
        "service_tier", "store", "verbosity",
    })  # fmt: skip

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The maximum number of tokens of the answer."""
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    """The number of answers."""
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_BIASES)] = Field(default_factory=dict)
    """Added to the logits of tokens, by their ids."""
    user: Name | None = None

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, given: StreamOptions, known: ValidationInfo) -> StreamOptions:
        if known.data.get("stream") is False:
            raise wrong("it needs 'stream': true; add that, or leave it out")
        return given

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def token_limit(self) -> int | None:
        """The maximum number of tokens of the answer, if the request sets one."""
        return self.max_tokens

    @property
    def count(self) -> int:
        """The number of answers."""
        return self.n

    @property
    def bias(self) -> dict[int, float]:
        """What is added to the logits of tokens."""
        return {int(token): bias for token, bias in self.logit_bias.items() if bias}

    @property
    def stops(self) -> list[str]:
        """Strings that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class TextPart(Strict):
    """A text part of a message; no other kind of part is supported."""

    hints: ClassVar[frozenset[str]] = frozenset({"cache_control", "prompt_cache_breakpoint"})

    type: Literal["text"]
    text: Text


class JsonSchema(Strict):
    """A JSON Schema with a name."""

    name: Name
    schema_: Annotated[Object, Field(alias="schema")] = Field(default_factory=dict)
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

    void: ClassVar[Mapping[str, Sequence[Any]]] = {"tool_calls": ([],)}
    hints: ClassVar[frozenset[str]] = frozenset({"annotations", "parsed", "cache_control"})

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_no_function)]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)]
    name: Name | None = None
    reasoning_content: Text | None = None
    """The reasoning before an answer."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    """The calls of an answer."""
    tool_call_id: Name | None = None
    """The call whose result a message of the role 'tool' is."""

    @model_validator(mode="before")
    @classmethod
    def _empty_answer(cls, given: Any) -> Any:
        """Complete an answer whose content is null, as clients send it."""
        answers = isinstance(given, dict) and given.get("role") == "assistant" and given.get("content") is None
        return given | {"content": ""} if answers else given

    @property
    def text(self) -> str:
        """The text of all parts."""
        return text_of(self.content)

    @model_validator(mode="after")
    def _calls_of_answers(self) -> Message:
        if self.tool_calls is not None and self.role != "assistant":
            raise wrong("'tool_calls' belong to messages of the role 'assistant'")
        if self.reasoning_content is not None and self.role != "assistant":
            raise wrong("'reasoning_content' belongs to messages of the role 'assistant'")
        if (self.tool_call_id is not None) is not (self.role == "tool"):
            raise wrong("'tool_call_id' belongs to messages of the role 'tool', and to all of them")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.reasoning_content:
            found["reasoning_content"] = self.reasoning_content
        if self.tool_calls is not None:
            found["tool_calls"] = [one.described() for one in self.tool_calls]
        return found if self.tool_call_id is None else found | {"tool_call_id": self.tool_call_id}


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]


def _no_known_variable(given: dict[str, Any]) -> dict[str, Any]:
    taken = {"messages", "tools", "documents", "add_generation_prompt"} & given.keys()
    if taken:
        raise wrong(f"'{min(taken)}' is a variable that the server sets; leave it out")
    return given


Variables = Annotated[Object, AfterValidator(_no_known_variable)]


class ChatRequest(CompletionRequest, ConversationRequest):
    """``POST /v1/chat/completions``."""

    void: ClassVar[Mapping[str, Sequence[Any]]] = {
        "tools": ([],), "response_format": ({"type": "text"},), "modalities": (["text"],),
    }  # fmt: skip

    messages: Annotated[Messages, Field(min_length=1)]
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    """An answer may have several calls."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """OpenAI's newer name of ``max_tokens``."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """How much the model reasons before an answer, if its chat template knows that."""
    chat_template_kwargs: Variables = Field(default_factory=dict)
    """More variables of the chat template."""
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

    @field_validator("tool_choice")
    @classmethod
    def _of_a_tool(cls, given: str | NamedTool, known: ValidationInfo) -> str | NamedTool:
        names = [one.function.name for one in known.data.get("tools") or ()]
        if isinstance(given, NamedTool) and given.function.name not in names:
            raise wrong(f"no tool is called '{given.function.name[:100]}'; add it to 'tools'")
        if given == "required" and not names:
            raise wrong("'required' needs 'tools'; add them, or leave it out")
        return given

    @field_validator("tools", "response_format")
    @classmethod
    def _the_only_form(cls, given: Any, known: ValidationInfo) -> Any:
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
        variables = effort_variables(self.reasoning_effort) | self.chat_template_kwargs
        return conversation(messages, self.answer_form.tools, "messages", continues=self.continues, variables=variables)

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        return self.continue_final_message

    @property
    def token_limit(self) -> int | None:
        """The maximum number of tokens of the answer, if the request sets one."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def answer_form(self) -> AnswerForm:
        """What the answer may be."""
        given, choice = self.response_format, self.tool_choice
        schema = (
            None if given is None else {"type": "object"} if given.json_schema is None else given.json_schema.schema_
        )
        tools = [one.described() for one in self.tools or ()]
        if isinstance(choice, NamedTool):
            return AnswerForm(tools, "required", [choice.function.name], False, schema)
        return AnswerForm(tools, choice, None, self.parallel_tool_calls, schema)

    @property
    def logprob_count(self) -> int | None:
        """The number of likeliest tokens reported with each token; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    def reply(self, context: Context) -> Reply:
        """Return the reply."""
        return Choices(context, self, self.logprobs, AnswerParts(context, self.calls()))


class TextRequest(CompletionRequest):
    """``POST /v1/completions``."""

    void: ClassVar[Mapping[str, Sequence[Any]]] = {
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

    def answers(self, tokenizer: Any, prompt: Sequence[int]) -> Answers:
        """Return the format of texts, which have neither reasoning nor calls."""
        return Answers(AnswerFormat(), tokenizer)

    def reply(self, context: Context) -> Reply:
        """Return the reply."""
        return Choices(context, self, self.logprobs is not None)


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
            return conversation([one.plain() for one in self.messages], (), "messages")
        return self.prompt or ""


# -- replies ----------------------------------------------------------------------------------------------


class Choices:
    """The reply with one answer to a request: one choice. logprobs: whether it has log-probabilities. parts: those of
    an answer of a conversation; None: it continues a text."""

    def __init__(
        self, context: Context, request: CompletionRequest, logprobs: bool, parts: AnswerParts | None = None
    ) -> None:
        self._parts, self._context = parts, context
        self._logprobs, self._with_usage = logprobs, request.usage_in_stream
        self._last = context.index == request.count - 1
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
            choice = {"message": _message(self._parts.joined(self._parts.all(last)))}
        choice |= {"index": self._context.index, "finish_reason": self._reason(last)}
        choice["logprobs"] = self._probabilities(tokens) if self._logprobs else None
        self._context.ended.append(last)
        found = {"object": self._kind, "choices": [choice], "usage": usage(self._context.ended)}
        return self._head | found | self._context.extension(last)

    def _reason(self, answer: Finished) -> str:
        """Return the finish reason. An answer cut off by the time limit or the server's end has the reason
        "length"."""
        if answer.reason != "stop":
            return "length"
        return "tool_calls" if self._parts is not None and self._parts.calls else "stop"

    async def stream(self, events: AsyncIterator[StreamEvent | Progress]) -> AsyncIterator[str]:
        """Yield the answer as server-sent events. An error is an object, and progress is a comment."""
        if self._parts is not None:
            yield self._chunk({"delta": {"role": "assistant", "content": ""}})
        async for event in events:
            if isinstance(event, TextPiece):
                shown = {"logprobs": self._probabilities(event.logprobs)} if self._logprobs else {}
                fields = self._deltas(event) or ([self._nothing] if shown else [])
                for number, one in enumerate(fields):
                    yield self._chunk(one if number else one | shown)
            elif isinstance(event, Finished):
                for one in self._deltas(event):
                    yield self._chunk(one)
                self._context.ended.append(event)
                yield self._chunk(self._nothing, self._reason(event), self._context.extension(event))
                if self._with_usage and self._last:
                    end = {"object": self._chunk_kind, "choices": [], "usage": usage(self._context.ended)}
                    yield server_sent(self._head | end)
            elif isinstance(event, Progress):
                yield event.comment
            else:
                yield server_sent(self._context.to_error(event).body())
        if self._last:
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


def usage(answers: Sequence[Finished]) -> dict[str, Any]:
    """Return the numbers of tokens of the answers to a request; cached tokens were not read again. For a text past
    its exact part, include the length of this part; if the oldest entries were dropped, include their number."""
    answer, written = answers[0], sum(one.written for one in answers)
    prompt = answer.cached + answer.read
    limits = {"exact_tokens": answer.exact_tokens, "lost_tokens": answer.lost_tokens or None}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": answer.cached},
        **{name: number for name, number in limits.items() if number is not None},
    }


def _message(said: Sequence[str | Reasoning | AnswerCall]) -> dict[str, Any]:
    """Return an answer's message."""
    content = "".join(one for one in said if isinstance(one, str))
    reasoning = "".join(one.text for one in said if isinstance(one, Reasoning))
    calls = [_call(one) for one in said if isinstance(one, AnswerCall)]
    extra = {"reasoning_content": reasoning, "tool_calls": calls}
    message = {"role": "assistant", "content": (content or None) if calls else content}
    return message | {name: one for name, one in extra.items() if one}


def _call(call: AnswerCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
