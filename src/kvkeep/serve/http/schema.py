"""Request bodies: OpenAI's fields, and ``kvkeep``. Any other field is an error that names it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvkeep.engine.answer import Ask
from kvkeep.engine.sampling import Sampling

T = TypeVar("T")
_SEED = 2**63
DEFAULT_MAX_TOKENS = 1024
"""``max_tokens`` of a request that has none; fewer if the model's context has less room."""
MAX_MESSAGES, MAX_PARTS, MAX_ALL_PARTS = 10_000, 1000, 50_000
"""Messages of a request; text parts of one message, and of all messages together."""
MAX_STOPS, MAX_STOP = 16, 1000
"""Stop strings of a request, and characters of one."""
MAX_NAME, MAX_OPTION = 1000, 200
"""Characters of a name (model, user, of a message), and of an option of kvkeep."""
MAX_FIELDS = 100
"""Fields of an object, known or not."""


def _complete(text: str) -> str:
    """Return the text, if all characters are complete. JSON escapes can encode half of one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong("it contains half a character (a lone surrogate)") from None
    return text


def _wrong(reason: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{reason}", {"reason": reason})


def _empty(given: T) -> T:
    """Return an empty value, which asks for nothing."""
    if given:
        raise PydanticCustomError("unsupported", "is not supported")
    return given


def _no_tool(role: Any) -> Any:
    if role in ("tool", "function"):
        raise _wrong(f"tools are not supported; send what the {role} returned as text in a message of the role 'user'")
    return role


def _one_prompt(given: Any) -> Any:
    """Return the prompt of a list of one, as clients send it."""
    if not isinstance(given, list) or not given or not isinstance(given[0], str | list):
        return given
    if len(given) > 1:
        raise _wrong(f"it has {len(given)} prompts; send one prompt at a time")
    return given[0]


def _of_few_parts(given: Any) -> Any:
    """Return the messages, unless all together have too many parts."""
    contents = (one.get("content") for one in given if isinstance(one, dict)) if isinstance(given, list) else ()
    if (count := sum(len(one) for one in contents if isinstance(one, list))) > MAX_ALL_PARTS:
        raise _wrong(f"the messages have {count} parts, and at most {MAX_ALL_PARTS} are allowed; join some of them")
    return given


def _not_empty(given: str) -> str:
    if not given:
        raise _wrong("a stop string cannot be empty; leave it out")
    return given


Text = Annotated[str, AfterValidator(_complete)]
Name = Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_complete)]
Option = Annotated[str, Field(min_length=1, max_length=MAX_OPTION), AfterValidator(_complete)]
Stop = Annotated[str, Field(max_length=MAX_STOP), AfterValidator(_complete), AfterValidator(_not_empty)]
NoList = Annotated[list[Any], AfterValidator(_empty), Field(json_schema_extra={"maxItems": 0})]
NoObject = Annotated[dict[str, Any], AfterValidator(_empty), Field(json_schema_extra={"maxProperties": 0})]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Treat null as a missing field, as clients send it. Refuse many fields, each of which could be an error."""
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise _wrong(f"it has {len(given)} fields, and at most {MAX_FIELDS} are allowed; leave out the others")
        return {name: one for name, one in given.items() if one is not None} if isinstance(given, dict) else given


class TextPart(_Strict):
    """A text part of a message; no other kind of part is supported."""

    type: Literal["text"]
    text: Text


class Message(_Strict):
    """A message of a conversation. Other fields of OpenAI's messages have to be empty. An answer without a content is
    empty."""

    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_no_tool)]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)]
    name: Name | None = None
    tool_calls: NoList = []
    annotations: NoList = []

    @model_validator(mode="before")
    @classmethod
    def _empty_answer(cls, given: Any) -> Any:
        """Complete an answer whose content is null, as clients send it."""
        answers = isinstance(given, dict) and given.get("role") == "assistant" and given.get("content") is None
        return given | {"content": ""} if answers else given

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES), BeforeValidator(_of_few_parts)]


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: bool = False
    """Send a final chunk with the token counts."""


class Extension(_Strict):
    """Options of kvkeep."""

    session: Option | None = None
    """Name of the conversation. The server keeps its cache for the next request."""
    method: Option | None = None
    """Cache method of a new conversation; an existing one keeps its method."""
    budget: Option | int | None = None
    """Cache budget of a new conversation: entries per layer (512), bytes ("64MB"), or a share ("25%")."""
    at_end: Literal["endless"] | None = None
    """Beyond the model's positions: continue with the method endless; without it, longer prompts are refused. Send it
    with every request of the conversation."""


class TextFormat(_Strict):
    """The form of an answer: text."""

    type: Literal["text"]


class _Ignored(_Strict):
    """Fields that have no effect. Only the values listed are allowed; any other value is an error."""

    store: Annotated[bool, AfterValidator(_empty), Field(json_schema_extra={"const": False})] = False
    metadata: NoObject = {}
    logit_bias: NoObject = {}
    service_tier: Literal["auto", "default"] = "auto"


class _Common(_Ignored):
    model: Name
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=100)] = 1.0
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-_SEED, lt=_SEED)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=1)] = 1
    user: Name | None = None
    kvkeep: Extension = Extension()

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, given: StreamOptions, known: ValidationInfo) -> StreamOptions:
        if known.data.get("stream") is False:
            raise _wrong("it needs 'stream': true; add that, or leave it out")
        return given

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def ask(self, prompt: list[int], max_tokens: int, top_logprobs: int | None) -> Ask:
        """Return the request to the engine."""
        sampling = Sampling(
            self.temperature, self.top_p, self.top_k, self.min_p,
            self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.seed,
        )  # fmt: skip
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Ask(prompt, max_tokens, sampling, stops, top_logprobs)

    def cache(self) -> dict[str, Any]:
        """Return method and budget, if the request names them."""
        options = {"method": self.kvkeep.method, "budget": self.kvkeep.budget}
        return {name: one for name, one in options.items() if one is not None}


class ChatRequest(_Common):
    """``POST /v1/chat/completions``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}]
        }
    )

    messages: Annotated[Messages, Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    continue_final_message: bool = False
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: NoList = []
    tool_choice: Literal["none", "auto"] = "auto"
    parallel_tool_calls: bool = True
    functions: NoList = []
    function_call: Literal["none", "auto"] = "auto"
    response_format: TextFormat = TextFormat(type="text")
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] = ["text"]

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_number(cls, given: int, known: ValidationInfo) -> int:
        if known.data.get("max_tokens") is not None:
            raise _wrong("'max_tokens' means the same; leave one of them out")
        return given

    @field_validator("continue_final_message")
    @classmethod
    def _of_an_answer(cls, given: bool, known: ValidationInfo) -> bool:
        messages = known.data.get("messages", [])
        if given and messages and (len(messages) < 2 or messages[-1].role != "assistant"):
            raise _wrong("the last message has to be an answer (role 'assistant') to an earlier message")
        return given

    @field_validator("top_logprobs")
    @classmethod
    def _of_probabilities(cls, given: int, known: ValidationInfo) -> int:
        if given and known.data.get("logprobs") is False:
            raise _wrong("it needs 'logprobs': true; add that, or leave it out")
        return given

    @property
    def logprob_count(self) -> int | None:
        """The number of likeliest tokens reported with each token; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """The maximum number of tokens of the answer, if the request sets one."""
        return self.max_completion_tokens or self.max_tokens


class TextRequest(_Common):
    """``POST /v1/completions``."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 20}]}
    )

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """The maximum number of tokens of the answer; 0: the prompt is only read."""
    prompt: Annotated[
        Text | Annotated[list[int], Field(fail_fast=True, min_length=1)],
        BeforeValidator(_one_prompt),
        Field(description="A text, a list of token ids, or a list with one prompt of either kind."),
    ]
    suffix: Annotated[str, AfterValidator(_empty), Field(json_schema_extra={"maxLength": 0})] = ""
    best_of: Annotated[int, Field(ge=1, le=1)] = 1
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False

    @field_validator("echo")
    @classmethod
    def _without_prompt(cls, given: bool) -> bool:
        if given:
            raise _wrong("the prompt is never sent back; leave it out")
        return given

    @property
    def logprob_count(self) -> int | None:
        """The number of likeliest tokens reported with each token; None: no log-probabilities."""
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        """The maximum number of tokens of the answer, if the request sets one."""
        return self.max_tokens


class TokenizeRequest(_Strict):
    """``POST /tokenize``: a text (``prompt``), or a conversation up to its answer (``messages``)."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Once upon a time"}]})

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None

    @field_validator("messages")
    @classmethod
    def _one_of_both(cls, given: list[Message] | None, known: ValidationInfo) -> list[Message] | None:
        if given is not None and known.data.get("prompt") is not None:
            raise _wrong("the request also has a 'prompt'; leave one of them out")
        return given
