"""Prompts: from the messages of a conversation, or a text and a question, to token ids.

Some names of special tokens in a text are data. No setting of the tokenizer is changed, so that several threads can use
it at once.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, chain, islice
from types import MappingProxyType
from typing import Any

from kvkeep.decode.answer_format import AnswerFormat
from kvkeep.decode.recognition import answer_format
from kvkeep.decode.replay import bodies, replayed
from kvkeep.decode.texts import check_text
from kvkeep.decode.tool_texts import Messages, Tools, with_tools
from kvkeep.engine.token_spelling import ALPHABET, SPACE
from kvkeep.errors import KvkeepError, ModelError, UsageError, out_of_memory, ran_out_of_memory
from kvkeep.models.chat_templates import TemplateTooCostly, filled
from kvkeep.native.room import has_room

GENERATED, NUMBER = "generated", "number"
"""Fields of a message for this module: an answer as it was generated (:class:`~kvkeep.decode.replay.Generated`), and
the message's number in its conversation."""
_FEW = 2
"""Messages of a conversation that has no answer yet: their places are not looked for."""
Variables = Mapping[str, Any]
EMPTY: Variables = MappingProxyType({})
Span = tuple[int, int]
"""The place of the first character, and of the first one after it."""
BYTES_PER_BYTE = 640
"""Memory that encoding takes at most for a byte of text. Measured with 1 MB of words, digits, CJK, emoji, punctuation,
names of special tokens and random letters: 100 to 534 bytes with SmolLM2's tokenizer, 67 to 146 with Gemma 3's."""
LEAST_BYTES = 16 << 20
"""Memory that encoding takes for a text of any length, with some to spare for what other threads do meanwhile."""

# -- messages ---------------------------------------------------------------------------------------------


def question(text: str | None, prompt: str | None) -> Messages:
    """Return the user's message with ``text`` (if any) and ``prompt``. Raises UsageError if both are empty, or if the
    prompt is not UTF-8."""
    check_text(prompt or "", "the prompt")
    parts = [part for part in (text, prompt) if part and part.strip()]
    if not parts:
        raise UsageError("There is nothing to answer: give a prompt (--prompt) or a text (--file).")
    return [{"role": "user", "content": "\n\n".join(parts)}]


def encode(tokenizer: Any, messages: Messages, *, raw: bool = False, answer: str = "") -> list[int]:
    """Return the token ids of a conversation up to the next answer, and of the beginning of that answer.

    A model with a chat template gets the filled template. A base model (and ``raw``) gets the contents as plain text.
    Names of special tokens in messages are encoded as text and end no turn; in a ``raw`` prompt they are tokens.
    Raises UsageError for text that is not UTF-8, and if the model's template rejects the conversation or leaves out a
    message.
    """
    return prompt_text(tokenizer, messages, raw=raw, answer=answer).ids(tokenizer)


def prompt_text(
    tokenizer: Any,
    messages: Messages,
    *,
    raw: bool = False,
    answer: str = "",
    tools: Tools = (),
    variables: Variables = EMPTY,
) -> PromptText:
    """Return the text of a conversation, as :func:`encode` encodes it. Raises UsageError as it does. tools: those that
    the answer may call, as OpenAI describes them; messages may have calls, results and reasoning. variables: more
    variables of the chat template."""
    for message in messages:
        check_text(message["content"], "the prompt")
    template = not raw and getattr(tokenizer, "chat_template", None)
    if tools or any(one["role"] == "tool" or {"tool_calls", "reasoning_content"} & one.keys() for one in messages):
        format = answer_format(tokenizer) if template else AnswerFormat()
        if format.describes and tools and not _takes_tools(tokenizer, tools):
            format = replace(format, describes=False)
        messages, tools = with_tools(messages, tools, format)
    if template:
        chat = _chat(tokenizer, messages, tools, variables)
        return replace(chat, begins=_lacks_beginning(tokenizer, chat)) + as_data(tokenizer, answer)
    text = "\n\n".join(message["content"] for message in messages) + answer
    return PromptText(text) if raw else as_data(tokenizer, text)


def _takes_tools(tokenizer: Any, tools: Tools) -> bool:
    """Return whether a template that describes tools describes these: some fail on schemas that others know."""
    try:
        fill(tokenizer, [{"role": "user", "content": "?"}], tools)
    except TemplateTooCostly:
        raise
    except UsageError:
        return False
    return True


def _chat(tokenizer: Any, messages: Messages, tools: Tools, variables: Variables) -> PromptText:
    """Return the text of a chat template. It is filled with a mark for each name of a special token in a message or a
    tool: a private-use character that occurs in none."""
    pattern = special_names(tokenizer)
    generated = {number: one[GENERATED] for number, one in enumerate(messages) if GENERATED in one}
    numbers = [one.get(NUMBER) for one in messages]
    messages = [{name: part for name, part in one.items() if name not in (GENERATED, NUMBER)} for one in messages]
    texts = [*texts_of(messages), *texts_of(tools)]
    hits = dict.fromkeys(() if pattern is None else (hit[0] for one in texts for hit in pattern.finditer(one)))
    known = set().union(*texts)
    free = (chr(code) for code in chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)) if chr(code) not in known)
    bodies_mark, *others = [*islice(free, 1 + len(hits))] or [""]
    if not bodies_mark or len(others) < len(hits):
        raise UsageError(
            "The prompt contains nearly all private-use characters; kvkeep needs some of them: leave some out."
        )
    marks = dict(zip(hits, others, strict=True))
    if pattern is not None and hits:

        def marked(text: str) -> str:
            return pattern.sub(lambda hit: marks[hit[0]], text)

        messages, tools = _with_texts(messages, marked), _with_texts(tools, marked)
    filled_in = fill(tokenizer, messages, tools, variables)
    several = generated or len(messages) > _FEW  # another fill costs milliseconds where tools are many
    places = _bodies(tokenizer, filled_in, messages, tools, variables, bodies_mark) if several else []
    answers = dict[Span, Sequence[int]]()
    for number, one in generated.items() if places else ():
        start, end = places[number]
        first, ids = replayed(tokenizer, filled_in[start:end], messages[number], one)
        if ids:
            answers[start + first, end] = ids
    names = {mark: name for name, mark in marks.items()}
    parts = [*_parts(f"[{''.join(names)}]", filled_in)] if names else [filled_in]
    starts = [*accumulate(map(len, parts), initial=0)]
    moved = [*accumulate((len(names.get(part, part)) for part in parts), initial=0)]

    def there(span: Span) -> Span:
        """Return the place with the names of special tokens in the place of their marks."""
        at = [bisect_right(starts, place) - 1 for place in span]
        first, last = (moved[part] + place - starts[part] for part, place in zip(at, span, strict=True))
        return first, last

    hidden = [(start, start + 1) for start, part in zip(starts, parts, strict=False) if part in names]
    data = [span for span in hidden if not any(first <= span[0] < last for first, last in answers)]
    return PromptText(
        "".join(names.get(part, part) for part in parts),
        [there(span) for span in data],
        begins=False,
        answers={there(span): ids for span, ids in answers.items()},
        messages={number: there(span) for number, span in zip(numbers, places, strict=False) if number is not None},
    )


def _bodies(tokenizer: Any, text: str, messages: Messages, tools: Tools, variables: Variables, mark: str) -> list[Span]:
    """Return the place in a filled template of what it writes for each message; empty: that is not known."""
    kept = ("role", "name", "tool_call_id")
    marked = [
        {name: one[name] for name in kept if name in one} | {"content": f"{mark}{number}{mark}"}
        for number, one in enumerate(messages)
    ]
    try:
        return bodies(text, fill(tokenizer, marked, tools, variables), mark, len(messages)) or []
    except UsageError:  # it takes no result without its call
        return []


def texts_of(given: Any) -> Iterator[str]:
    """Yield all texts in messages or tools, the names of fields among them."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        yield from texts_of([*given, *given.values()])
    elif isinstance(given, Sequence):
        for one in given:
            yield from texts_of(one)


def _with_texts(given: Any, change: Callable[[str], str]) -> Any:
    """Return messages or tools with all texts changed, but for the roles of messages."""
    if isinstance(given, str):
        return change(given)
    if isinstance(given, Mapping):
        return {change(name): one if name == "role" else _with_texts(one, change) for name, one in given.items()}
    return [_with_texts(one, change) for one in given] if isinstance(given, Sequence) else given


def _parts(pattern: str, text: str) -> Iterator[str]:
    """Yield the parts of a text, in and between the hits of a pattern. Meanwhile other threads run."""
    end = 0
    for hit in re.finditer(pattern, text):
        yield text[end : hit.start()]
        yield hit[0]
        end = hit.end()
    yield text[end:]


def _lacks_beginning(tokenizer: Any, chat: PromptText) -> bool:
    """Return whether the text of a chat template lacks the token that begins a text, and the tokenizer adds it there:
    that of a GGUF file does, as llama.cpp's server."""
    named = chat.text.startswith(tokenizer.bos_token or "") and not (chat.data and chat.data[0][0] == 0)
    return getattr(tokenizer, "kvkeep_begins_chats", False) and not named


@dataclass(frozen=True)
class _Form:
    """How a template takes the messages of a conversation."""

    parts: bool = False
    """Whether a content is a list of parts; otherwise it is a string."""
    dropped: tuple[str, ...] = ()
    """The roles of messages that the template leaves out."""


def fill(tokenizer: Any, messages: Messages, tools: Tools = (), variables: Variables = EMPTY) -> str:
    """Return the text of a conversation up to its answer. Raises UsageError if the template rejects the conversation,
    leaves a message out or takes too many steps."""
    try:
        form = _form(tokenizer, tokenizer.get_chat_template(), tuple(one["role"] for one in messages))
        text = _in_form(tokenizer, messages, form.parts, tools, variables)
    except TemplateTooCostly:
        raise
    except Exception as error:  # a template is the model's code and may raise anything
        if ran_out_of_memory(error):
            raise out_of_memory("a chat template", error) from error
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        system = any(message["role"] == "system" for message in messages)
        remedy = "leave the system prompt out" if system else "give a plain prompt (--raw) or use another model"
        raise UsageError(f"The model's chat template rejects this conversation ({first}); {remedy}.") from error
    if form.dropped:
        roles = " and ".join(f"'{one}'" for one in form.dropped)
        raise UsageError(
            f"The model's chat template leaves out a message of the role {roles} of this conversation, so the model "
            "would not read it; put its text into the question."
        )
    return text


@lru_cache(maxsize=64)
def _form(tokenizer: Any, template: str, roles: Sequence[str]) -> _Form:
    """Return how a template takes messages of these roles. It is filled with a mark for each message: a template that
    goes through the parts of a content leaves a string out, and one that writes strings may fail with parts."""
    marked = [{"role": role, "content": f"kept{number}q"} for number, role in enumerate(roles)]
    forms = []
    for parts in (False, True):
        try:
            text = _in_form(tokenizer, marked, parts)
        except TemplateTooCostly:
            raise
        except Exception as error:  # the conversation itself tells whether the template takes it
            if ran_out_of_memory(error):
                raise
            continue
        found = {int(number) for number in re.findall(r"kept(\d+)q", text)}
        missing = (role for number, role in enumerate(roles) if number not in found)
        forms.append(_Form(parts, tuple(dict.fromkeys(missing))))
        if not forms[-1].dropped:
            return forms[-1]
    return forms[0] if forms else _Form()


def _in_form(tokenizer: Any, messages: Messages, parts: bool, tools: Tools = (), variables: Variables = EMPTY) -> str:
    given: list[Any] = [
        one | {"content": [{"type": "text", "text": one["content"]}]} if parts and one["content"] is not None else one
        for one in messages
    ]
    return filled(tokenizer, given, tools, variables)


# -- texts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptText:
    """The text of a prompt."""

    text: str
    data: Sequence[Span] = ()
    """Names of special tokens that are data, in the order of the text."""
    begins: bool = True
    """Whether the tokenizer adds the special tokens that begin a text. The text of most chat templates has them."""
    answers: Mapping[Span, Sequence[int]] = field(default_factory=dict)
    """The tokens of answers as they were generated, in the place of their texts (:mod:`kvkeep.decode.replay`)."""
    messages: Mapping[int, Span] = field(default_factory=dict)
    """The place of the text of each message with a number (:data:`NUMBER`); empty: that is not known."""

    def __add__(self, other: PromptText) -> PromptText:
        shift = len(self.text)
        moved = ((start + shift, stop + shift) for start, stop in other.data)
        return replace(self, text=self.text + other.text, data=[*self.data, *moved])

    def ids(self, tokenizer: Any) -> list[int]:
        """Return the token ids. A name that is data is spelt by its characters; the texts between names and generated
        answers are encoded by themselves. Raises ModelError for a text that the tokenizer cannot read, and
        OutOfMemory."""
        spans = sorted([*self.data, *self.answers])
        ends = [0, *(stop for _, stop in spans)]
        starts = [*(start for start, _ in spans), len(self.text)]
        first, *others = (self.text[start:stop] for start, stop in zip(ends, starts, strict=True))
        with encoding(self.text):
            try:
                ids = list(tokenizer(first, add_special_tokens=self.begins, verbose=False).input_ids)
                parts = tokenizer(others, add_special_tokens=False, verbose=False).input_ids if others else []
            except MemoryError:
                raise
            except Exception as error:  # tokenizers raises nothing more special
                raise ModelError(f"The model's tokenizer cannot read this text ({str(error)[:100]}).") from error
            for span, text, part in zip(spans, others, parts, strict=True):
                given = self.answers.get(span)
                ids += _spelt(tokenizer, self.text[slice(*span)]) if given is None else given
                ids += _following(tokenizer, text, part)
        return ids


@contextmanager
def encoding(text: str) -> Iterator[None]:
    """Within the block ``text`` is encoded. Raises OutOfMemory if there is not enough memory for that: the tokenizer
    itself would end the process. Other errors of the tokenizer that are no Exception become KvkeepError."""
    size = len(text) if text.isascii() else len(text.encode(errors="replace"))
    doing = f"encoding a text of {size:,} bytes"
    if not has_room(LEAST_BYTES + BYTES_PER_BYTE * size):
        raise out_of_memory(doing)
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if ran_out_of_memory(error):
            raise out_of_memory(doing, error) from error
        if isinstance(error, Exception):
            raise
        # a panic of the tokenizer's library, whose words may be those of the text
        raise KvkeepError(f"The tokenizer failed on this text ({type(error).__name__}); change the text.") from error


def as_data(tokenizer: Any, text: str) -> PromptText:
    """Return a text in which every name of a special token is data."""
    pattern = special_names(tokenizer)
    return PromptText(text, [] if pattern is None else [hit.span() for hit in pattern.finditer(text)])


@lru_cache(maxsize=4)
def special_names(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of the names of a tokenizer's special tokens; None if it has none."""
    names = {one.content for one in tokenizer.added_tokens_decoder.values() if one.special and one.content}
    return re.compile(_any_of(names)) if names else None


def _any_of(names: Collection[str]) -> str:
    """Return a pattern of the longest of some names. Names with a common beginning are searched for at once, because a
    tokenizer may have thousands."""
    if len(names) == 1:
        return re.escape(next(iter(names)))
    rests = defaultdict[str, list[str]](list)
    for name in names:
        if name:
            rests[name[0]].append(name[1:])
    pattern = "|".join(re.escape(first) + _any_of(rest) for first, rest in rests.items())
    return f"(?:{pattern}){'?' if '' in names else ''}" if pattern else ""


@lru_cache(maxsize=256)
def _spelt(tokenizer: Any, name: str) -> list[int]:
    """Return the ids of a name's characters, or of its bytes."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return list(tokenizer(name, add_special_tokens=False, split_special_tokens=True).input_ids)
    state = b"" if backend.pre_tokenizer is None else backend.pre_tokenizer.__getstate__()
    if b'"ByteLevel"' in state:
        letters = {byte: letter for letter, byte in ALPHABET.items()}
        name = "".join(letters[byte] for byte in name.encode())
    return [one.id for letter in name for one in backend.model.tokenize(letter.replace(" ", SPACE))]


def _following(tokenizer: Any, text: str, ids: list[int]) -> list[int]:
    """Return the ids of a text that follows another one: without the space that some tokenizers put before a text."""
    spaces = len(text) - len(text.lstrip(" ")) + 1
    names = tokenizer.convert_ids_to_tokens(ids[:spaces])
    if not "".join(names).startswith(SPACE * spaces) or not hasattr(tokenizer, "backend_tokenizer"):
        return ids
    return [one.id for one in tokenizer.backend_tokenizer.model.tokenize(names[0][1:])] + ids[1:]


def shortened(tokenizer: Any, text: str, limit: int) -> tuple[str, int]:
    """Return the first ``limit`` tokens of ``text`` as text, and the number of tokens of the whole text."""
    with encoding(text):
        encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
    count = len(encoded.input_ids)
    return (text, count) if count <= limit else (text[: encoded.offset_mapping[limit - 1][1]], count)
