"""What protocols share: the fields of a request, its prompt, and what a reply is.

A protocol is one file, with its requests and its replies. Any field that is not declared is an error that names it.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvkeep.decode.prompt import GENERATED, PromptText, prompt_text, texts_of
from kvkeep.decode.replay import Generated
from kvkeep.engine.answer import Ask
from kvkeep.engine.forms import of_lark, of_regex
from kvkeep.engine.grammar import Grammar
from kvkeep.engine.pieces import TextPiece
from kvkeep.engine.sampling import Sampling
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.session import Finished

_SEED = 2**63
MAX_PROMPT_CHARACTERS, MAX_PROMPT_TOKENS = 4_000_000, 1_000_000
"""Characters and tokens of a prompt. The tokenizer takes up to 600 bytes for a token."""
MAX_STOPS, MAX_STOP = 16, 1000
"""Stop strings of a request, and characters of one."""
MAX_NAME, MAX_OPTION = 1000, 200
"""Characters of a name (model, user, of a message), and of an option of kvkeep."""
MAX_FORM = 100_000
"""Characters of a regular expression or a grammar."""
MAX_DEPTH = 100
"""Levels of a JSON Schema, and of the arguments of a call."""
MAX_FIELDS = 100
"""Fields of an object, known or not."""


# -- fields -----------------------------------------------------------------------------------------------


def wrong(reason: str) -> PydanticCustomError:
    """Return the error of a field's value."""
    return PydanticCustomError("wrong", "{reason}", {"reason": reason})


def _complete(text: str) -> str:
    """Return the text, if all characters are complete. JSON escapes can encode half of one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise wrong("it contains half a character (a lone surrogate)") from None
    return text


def _not_empty(given: str) -> str:
    if not given:
        raise wrong("a stop string cannot be empty; leave it out")
    return given


def readable(given: Any) -> Any:
    """Return an object of any fields, if it can be JSON again and is not deep: what reads it calls itself for
    each level."""
    layer, depth = [given], 0
    while layer := [one for part in layer for one in (part.values() if isinstance(part, dict) else part)
                    if isinstance(one, dict | list)]:  # fmt: skip
        depth += 1
        if depth > MAX_DEPTH:
            raise wrong(f"it is nested deeper than {MAX_DEPTH} levels; make it flatter")
    try:
        json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise wrong("it contains half a character (a lone surrogate), or a number that is not finite") from None
    return given


def by_type(wrong: str, kinds: Mapping[str, str] | None = None) -> Discriminator:
    """Return what chooses one of several objects by its ``type``, each with a ``Tag`` of a hyphen and this type; one
    without a type is a message. The hyphen keeps the tag out of errors' places. wrong: the reason if no object has the
    type. kinds: tags of types that have one together."""

    def tag(given: Any) -> str:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return f"-{(kinds or {}).get(kind, kind) if isinstance(kind, str) else 'message'}"

    return Discriminator(tag, custom_error_type="wrong", custom_error_message=wrong)


Object = Annotated[dict[str, Any], AfterValidator(readable)]
Text = Annotated[str, AfterValidator(_complete)]
Name = Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_complete)]
Option = Annotated[str, Field(min_length=1, max_length=MAX_OPTION), AfterValidator(_complete)]
Form = Annotated[str, Field(min_length=1, max_length=MAX_FORM), AfterValidator(_complete)]
Stop = Annotated[str, Field(max_length=MAX_STOP), AfterValidator(_complete), AfterValidator(_not_empty)]


class Strict(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    void: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Values with which a field asks for nothing, as clients send it. With others, the field is not supported."""
    hints: ClassVar[frozenset[str]] = frozenset()
    """Fields that may say anything: what they ask for cannot change an answer."""

    @model_validator(mode="before")
    @classmethod
    def _without_void(cls, given: Any) -> Any:
        """Leave out null, hints and what asks for nothing. Refuse many fields, each of which could be an error."""
        if not isinstance(given, dict):
            return given
        if len(given) > MAX_FIELDS:
            raise wrong(f"it has {len(given)} fields, and at most {MAX_FIELDS} are allowed; leave out the others")
        return {name: one for name, one in given.items() if one is not None and not cls._is_void(name, one)}

    @classmethod
    def _is_void(cls, name: str, given: Any) -> bool:
        return name in cls.hints or any(type(given) is type(one) and given == one for one in cls.void.get(name, ()))


class Extension(Strict):
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
    regex: Form | None = None
    """A regular expression that describes the answer as a whole."""
    grammar: Form | None = None
    """A grammar of the answer in the notation of Lark, as llguidance takes it."""

    @field_validator("grammar")
    @classmethod
    def _one_form(cls, given: str, known: ValidationInfo) -> str:
        if known.data.get("regex") is not None:
            raise wrong("'regex' also describes the answer; leave one of them out")
        return given


# -- requests ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt of messages, as chat templates take them."""

    messages: Sequence[Mapping[str, Any]]
    answer: str = ""
    """The beginning of the answer, which the model continues."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that the answer may call."""


Prompt = str | list[int] | ChatPrompt
FormOf = Callable[[Any, Any], str]
"""Returns a form for :class:`~kvkeep.engine.grammar.Grammar`, given the tokenizer and llguidance's vocabulary."""


StreamEvent = TextPiece | Finished | Exception
"""What the event loop receives from an answer."""


class Reply(Protocol):
    """The reply to one request."""

    def complete(self, events: Sequence[StreamEvent]) -> Mapping[str, Any]:
        """Return the answer as one object. Raises the error that ended it."""

    def stream(self, events: AsyncIterator[StreamEvent | None]) -> AsyncIterator[str]:
        """Yield the answer as server-sent events. None: nothing has happened for a while."""


_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Characters at which clients that read lines cut an event, and that JSON does not escape by itself."""


def server_sent(body: Mapping[str, Any], name: str | None = None) -> str:
    """Return a server-sent event. name: its type; None: it has none."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"{'' if name is None else f'event: {name}' + chr(10)}data: {text.translate(_LINE_ENDS)}\n\n"


@dataclass(frozen=True)
class Context:
    """What a reply knows besides its request."""

    model: str
    """The model's name."""
    id: str
    """An id of the answer, of 32 hexadecimal digits."""
    prompt_tokens: int
    to_error: Callable[[Exception], APIError]
    """Converts an exception within a stream to an error."""
    report: Callable[[Finished], Mapping[str, Any]] = lambda _: {}
    """Returns what the reply says of an answer in the field ``kvkeep``."""


class AnswerRequest(Strict):
    """The fields of every request for an answer."""

    model: Name
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=100)] = 1.0
    seed: Annotated[int, Field(ge=-_SEED, lt=_SEED)] | None = None
    stream: bool = False
    kvkeep: Extension = Extension()

    @abstractmethod
    def given(self) -> Prompt:
        """Return the prompt. A worker thread calls this. Raises APIError for a conversation that cannot be."""

    @property
    @abstractmethod
    def token_limit(self) -> int | None:
        """The maximum number of tokens of the answer, if the request sets one."""

    @property
    def stops(self) -> list[str]:
        """Strings that end the answer."""
        return []

    @property
    def logprob_count(self) -> int | None:
        """The number of likeliest tokens reported with each token; None: no log-probabilities."""
        return None

    def form(self) -> tuple[str, FormOf] | None:
        """Return the field that gives the answer a form, and what makes this form; None: the answer may be any
        text."""
        regex, grammar = self.kvkeep.regex, self.kvkeep.grammar
        if regex is not None:
            return "kvkeep.regex", lambda *_: of_regex(regex)
        if grammar is not None:
            return "kvkeep.grammar", lambda *_: of_lark(grammar)
        return None

    def ask(self, prompt: list[int], max_tokens: int, grammar: Grammar | None) -> Ask:
        """Return the request to the engine. grammar: the compiled :meth:`form`."""
        sampling = Sampling(
            self.temperature, self.top_p, self.top_k, self.min_p,
            self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.seed, grammar,
        )  # fmt: skip
        return Ask(prompt, max_tokens, sampling, self.stops, self.logprob_count)

    def cache(self) -> dict[str, Any]:
        """Return method and budget, if the request names them."""
        options = {"method": self.kvkeep.method, "budget": self.kvkeep.budget}
        return {name: one for name, one in options.items() if one is not None}

    @abstractmethod
    def reply(self, context: Context) -> Reply:
        """Return the reply, which has no events yet."""

    def answered(self, context: Context) -> Callable[[Finished], Mapping[str, Any]] | None:
        """Return what converts an answer to a message as chat templates take it; None: it is not one of a
        conversation."""
        return None


# -- prompts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids."""

    ids: list[int]
    messages: Sequence[tuple[int, str]] | None = None
    """The place in the prompt's text and the role of each message; empty: that is not known; None: the prompt is not a
    conversation."""


def encoded(
    prompt: Prompt, tokenizer: Any, vocabulary: int, generated: Callable[[Mapping[str, Any]], Generated | None]
) -> EncodedPrompt:
    """Return the token ids of a prompt. vocabulary: the number of the model's tokens. generated: returns a message as
    it was generated, if it was. Raises APIError for a wrong prompt."""
    places: list[tuple[int, str]] | None = None
    if isinstance(prompt, list):
        ids = prompt
        if min(ids) < 0 or max(ids) >= vocabulary:
            sentence = "'prompt' contains ids that are not in the model's vocabulary."
            raise APIError(400, sentence, "invalid_value", "prompt")
    else:
        if isinstance(prompt, ChatPrompt):
            _check_characters(sum(map(len, texts_of([prompt.messages, prompt.tools]))) + len(prompt.answer))
            messages = list[dict[str, Any]]()
            for one in prompt.messages:
                known = generated(one)
                messages.append({**one} if known is None else {**one, GENERATED: known})
            text = prompt_text(tokenizer, messages, answer=prompt.answer, tools=prompt.tools)
            places = [(start, one["role"]) for (start, _), one in zip(text.messages, messages, strict=False)]
        else:
            _check_characters(len(prompt))
            text = PromptText(prompt)
        ids = text.ids(tokenizer)
    if len(ids) > MAX_PROMPT_TOKENS:
        sentence = f"The prompt has {len(ids):,} tokens, and at most {MAX_PROMPT_TOKENS:,} are allowed; shorten it."
        raise APIError(400, sentence, "context_length_exceeded")
    return EncodedPrompt(ids, places)


def _check_characters(count: int) -> None:
    if count > MAX_PROMPT_CHARACTERS:
        sentence = f"The prompt has {count} characters, and at most {MAX_PROMPT_CHARACTERS} are allowed; shorten it."
        raise APIError(400, sentence, "context_length_exceeded")
