"""What protocols share: the fields of a request, its prompt, and what a reply is.

The requests of a protocol are one file; its replies are beside them, or a file of their own. Any field that is not
declared is an error that names it.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

from kvkeep.decode.answer_form import Answers, Calls, answers_to
from kvkeep.decode.instructions import instruction_tokens
from kvkeep.decode.prompt import GENERATED, NUMBER, PromptText, prompt_text, texts_of
from kvkeep.decode.replay import Generated
from kvkeep.decode.volatile import steady
from kvkeep.engine.answer import Ask
from kvkeep.engine.forms import of_lark, of_regex
from kvkeep.engine.grammar import Grammar
from kvkeep.engine.pieces import TextPiece
from kvkeep.engine.sampling import FIELDS, Sampling
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
    """Return an object of any fields, if it can be JSON again and is not deep: its readers call themselves."""
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
    """Fields that may say anything, for the makers' own services: the server does nothing with them."""

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
    answer: Option | None = None
    """Name of the answer, within its session. The server completes it also if the client disconnects, and keeps its
    stream."""
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

    @field_validator("answer")
    @classmethod
    def _of_a_session(cls, given: str, known: ValidationInfo) -> str:
        if known.data.get("session") is None:
            raise wrong("it names an answer of a 'session'; name one, or leave it out")
        return given

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
    variables: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the chat template."""


Prompt = str | list[int] | ChatPrompt
FormOf = Callable[[Answers, Any], str]
"""Returns a form for :class:`~kvkeep.engine.grammar.Grammar` by the format of answers and llguidance's vocabulary."""


StreamEvent = TextPiece | Finished | Exception
"""What the event loop receives from an answer."""


@dataclass(frozen=True)
class Progress:
    """How far a prompt is read: what a stream says while its answer has no event."""

    read: int
    """Its first tokens that the cache holds, those of earlier requests included."""
    total: int
    """All of its tokens."""

    @property
    def comment(self) -> str:
        """A comment of server-sent events, which clients leave out and the page reads."""
        return f": reading {self.read} of {self.total} tokens\n\n"


class Reply(Protocol):
    """The reply to one request."""

    def complete(self, events: Sequence[StreamEvent]) -> Mapping[str, Any]:
        """Return the answer as one object. Raises the error that ended it."""

    def stream(self, events: AsyncIterator[StreamEvent | Progress]) -> AsyncIterator[str]:
        """Yield the answer as server-sent events. Of progress, the comment."""


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
    answers: Answers
    """The format of the model's answers."""
    report: Callable[[Finished], Mapping[str, Any]] = lambda _: {}
    """Returns what the reply says of an answer in the field ``kvkeep``."""
    index: int = 0
    """The answer's number among those to the request."""
    ended: list[Finished | Exception] = field(default_factory=list)
    """The ends of all of them so far."""

    def extension(self, answer: Finished, notes: Sequence[str] = ()) -> dict[str, Any]:
        """Return a reply's field ``kvkeep`` by its name, with more ``notes``; without anything to say, no field."""
        found = dict(self.report(answer))
        if notes:
            found["notes"] = [*found.get("notes", ()), *notes]
        return {"kvkeep": found} if found else {}


class AnswerRequest(Strict):
    """The fields of every request for an answer."""

    model: Name
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """As of all settings of sampling, None is the default of :func:`~kvkeep.engine.sampling.default_sampling`."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=100)] | None = None
    seed: Annotated[int, Field(ge=-_SEED, lt=_SEED)] | None = None
    stream: bool = False
    kvkeep: Extension = Extension()

    @field_validator("kvkeep")
    @classmethod
    def _kept_stream(cls, given: Extension, known: ValidationInfo) -> Extension:
        if given.answer is not None and known.data.get("stream") is not True:
            raise wrong("'answer' needs 'stream': true; add that, or leave it out")
        return given

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

    @property
    def bias(self) -> dict[int, float]:
        """What is added to the logits of tokens."""
        return {}

    @property
    def count(self) -> int:
        """The number of answers."""
        return 1

    def form(self) -> tuple[str, FormOf] | None:
        """Return the field that gives the answer a form, and what makes this form; None: it may be any text."""
        regex, grammar = self.kvkeep.regex, self.kvkeep.grammar
        if regex is not None:
            return "kvkeep.regex", lambda answers, known: answers.after_reasoning(of_regex(regex), known)
        if grammar is not None:
            return "kvkeep.grammar", lambda answers, known: answers.after_reasoning(of_lark(grammar), known)
        return None

    def answers(self, tokenizer: Any, prompt: Sequence[int]) -> Answers:
        """Return the format of the answers to a prompt. A worker thread calls this."""
        return answers_to(tokenizer, prompt)

    def calls(self) -> Calls:
        """Return which calls the answer may have."""
        return Calls()

    def asks(
        self, prompt: list[int], max_tokens: int, defaults: Sampling, grammar: Grammar | None, answers: Answers
    ) -> list[Ask]:
        """Return the requests to the engine, one for each answer; with a seed, each has the next one. defaults: of the
        settings of sampling that the request leaves out. grammar: the compiled :meth:`form`. answers: their format."""
        given = {name: one for name, field in FIELDS.items() if (one := getattr(self, field)) is not None}
        sampling = replace(defaults, **given, grammar=grammar, bias=self.bias)
        seeds = [None if self.seed is None else (self.seed + number) % _SEED for number in range(self.count)]
        seeds[0] = self.seed
        named = answers.named(self.calls())
        return [
            Ask(prompt, max_tokens, replace(sampling, seed=seed), self.stops, self.logprob_count, named)
            for seed in seeds
        ]

    def cache(self) -> dict[str, Any]:
        """Return method and budget, if the request names them."""
        options = {"method": self.kvkeep.method, "budget": self.kvkeep.budget}
        return {name: one for name, one in options.items() if one is not None}

    @abstractmethod
    def reply(self, context: Context) -> Reply:
        """Return the reply, which has no events yet."""

    def answered(self, context: Context) -> Callable[[Finished], Mapping[str, Any]] | None:
        """Return what converts an answer to a message of chat templates; None: it is not one of a conversation."""
        return None


# -- prompts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids."""

    ids: list[int]
    messages: Sequence[tuple[int, str]] | None = None
    """The place in the prompt's text of each message, and the message's number and role; empty: that is not known;
    None: the prompt is not a conversation."""
    notes: Sequence[str] = ()
    """Sentences on what was changed in it."""
    instructions: int = 0
    """The number of its first tokens that are instructions and tools; 0 if they were not counted."""


def encoded(
    prompt: Prompt,
    tokenizer: Any,
    vocabulary: int,
    generated: Callable[[Mapping[str, Any]], Generated | None] = lambda _: None,
    as_sent: bool = False,
    pins: bool = False,
) -> EncodedPrompt:
    """Return the token ids of a prompt. vocabulary: the number of the model's tokens. generated: returns a message as
    it was generated, if it was. as_sent: whether lines that change with each session stay where they are
    (:func:`~kvkeep.decode.volatile.steady`). pins: whether the instructions are counted. Raises APIError for a wrong
    prompt."""
    notes, head = list[str](), list[dict[str, Any]]()
    places: list[tuple[int, str]] | None = None
    if isinstance(prompt, list):
        ids = prompt
        if min(ids) < 0 or max(ids) >= vocabulary:
            sentence = "'prompt' contains ids that are not in the model's vocabulary."
            raise APIError(400, sentence, "invalid_value", "prompt")
    else:
        if isinstance(prompt, ChatPrompt):
            _check_characters(sum(map(len, texts_of([prompt.messages, prompt.tools]))) + len(prompt.answer))
            given, notes = (prompt.messages, notes) if as_sent else steady(prompt.messages)
            messages = list[dict[str, Any]]()
            for number, one in enumerate(given):
                known = generated(one) if one["role"] == "assistant" else None
                messages.append({**one, NUMBER: number} | ({} if known is None else {GENERATED: known}))
            head = messages
            text = prompt_text(
                tokenizer, messages, answer=prompt.answer, tools=prompt.tools, variables=prompt.variables
            )
            places = [(start, f"{number} ({messages[number]['role']})") for number, (start, _) in text.messages.items()]
        else:
            _check_characters(len(prompt))
            text = PromptText(prompt)
        ids = text.ids(tokenizer)
    if len(ids) > MAX_PROMPT_TOKENS:
        sentence = f"The prompt has {len(ids):,} tokens, and at most {MAX_PROMPT_TOKENS:,} are allowed; shorten it."
        raise APIError(400, sentence, "context_length_exceeded")
    counted = 0
    if pins and isinstance(prompt, ChatPrompt):
        counted = instruction_tokens(tokenizer, ids, head, tools=prompt.tools, variables=prompt.variables)
    return EncodedPrompt(ids, places, notes, counted)


def _check_characters(count: int) -> None:
    if count > MAX_PROMPT_CHARACTERS:
        sentence = f"The prompt has {count} characters, and at most {MAX_PROMPT_CHARACTERS} are allowed; shorten it."
        raise APIError(400, sentence, "context_length_exceeded")
