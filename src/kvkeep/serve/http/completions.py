"""OpenAI's completions of conversations and of texts, and ``/tokenize``: the fields of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from kvkeep.decode.answer_form import Answers
from kvkeep.decode.answer_format import AnswerFormat
from kvkeep.serve.http.completion_reply import CompletionReply
from kvkeep.serve.http.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
    AnswerForm,
    AnswerParts,
    ConversationRequest,
    conversation,
    effort_variables,
    text_of,
)
from kvkeep.serve.http.protocol import (
    MAX_STOPS,
    AnswerRequest,
    Context,
    Name,
    Object,
    Prompt,
    Reply,
    Stop,
    Strict,
    Text,
    wrong,
)
from kvkeep.serve.http.tools import NamedTool, ToolCall, Tools


def _one_prompt(given: Any) -> Any:
    """Return the prompt of a list of one, as clients send it."""
    if not isinstance(given, list) or not given or not isinstance(given[0], str | list):
        return given
    if len(given) > 1:
        raise wrong(f"it has {len(given)} prompts; send one prompt at a time")
    return given[0]


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
    stream_options: StreamOptions = StreamOptions()
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
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def count(self) -> int:
        return self.n

    @property
    def bias(self) -> dict[int, float]:
        return {int(token): bias for token, bias in self.logit_bias.items() if bias}

    @property
    def stops(self) -> list[str]:
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

    role: Literal["system", "developer", "user", "assistant", "tool"]
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
        role = "system" if self.role == "developer" else self.role
        found: dict[str, Any] = {"role": role, "content": text_of(self.content)}
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
        return conversation(messages, self.answer_form, "messages", continues=self.continues, variables=variables)

    @property
    def continues(self) -> bool:
        return self.continue_final_message

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def answer_form(self) -> AnswerForm:
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
        return self.top_logprobs if self.logprobs else None

    def reply(self, context: Context) -> Reply:
        parts, usage = AnswerParts(context, self.calls()), self.stream_options.include_usage
        return CompletionReply(context, self.n, usage, self.logprobs, parts)


class TextRequest(CompletionRequest):
    """``POST /v1/completions``."""

    void: ClassVar[Mapping[str, Sequence[Any]]] = {"suffix": ("",), "best_of": (1,), "echo": (False,)}

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
        return self.logprobs

    def answers(self, tokenizer: Any, prompt: Sequence[int]) -> Answers:
        """Return the format of texts, which have neither reasoning nor calls."""
        return Answers(AnswerFormat(), tokenizer)

    def reply(self, context: Context) -> Reply:
        return CompletionReply(context, self.n, self.stream_options.include_usage, self.logprobs is not None)


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
            return conversation([one.plain() for one in self.messages], AnswerForm(), "messages")
        return self.prompt or ""
