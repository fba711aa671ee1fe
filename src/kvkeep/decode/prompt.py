"""Prompts: from a text and a question, or the messages of a conversation, to token ids."""

from __future__ import annotations

import os
import re
import select
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import IO, Any

from kvkeep.decode.encoding import PromptText, as_data, encoding, special_names
from kvkeep.errors import EmptyText, UsageError, out_of_memory, ran_out_of_memory, reason_of
from kvkeep.models.chat_templates import TemplateTooCostly, filled

Messages = list[dict[str, str]]
PIPE_S = 1.0
"""Seconds to wait for the program that writes to a named pipe."""


def read_text(path: str) -> str:
    """Return the text of a file, or of standard input for ``-``, without a byte order mark. Raises UsageError if there
    is no readable text, EmptyText if the file is empty."""
    try:
        data = standard_input().read() if path == "-" else _content(path)
    except OSError as error:
        raise UsageError(f"The file '{path}' cannot be read: {reason_of(error)}.") from error
    name = "standard input" if path == "-" else f"the file '{path}'"
    if b"\0" in data:
        raise UsageError(f"There is no text in {name}: it is binary; give a text file (UTF-8).")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"The text of {name} is not UTF-8 (byte {error.start}); convert it first.") from error
    if not text.strip():
        raise EmptyText(f"There is no text in {name}: it is empty.")
    return text


def _content(path: str) -> bytes:
    """Return the content of a file, or of a pipe that a program has opened for writing. Raises OSError."""
    if not stat.S_ISFIFO(os.stat(path).st_mode):
        return Path(path).read_bytes()
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe:
        first = b"" if select.select([pipe], [], [], PIPE_S)[0] else pipe.raw.read(1)  # None: there is a writer
        if first == b"" and not select.select([pipe], [], [], 0)[0]:
            raise UsageError(f"The pipe '{path}' cannot be read: no program writes to it; give a file.")
        os.set_blocking(pipe.fileno(), True)
        return (first or b"") + pipe.read()


def standard_input() -> IO[bytes]:
    """Return standard input as bytes. Raises UsageError if it is closed."""
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("Standard input is closed, so there is nothing to read from it; redirect it from a file.")
    return sys.stdin.buffer


def check_text(text: str, name: str) -> str:
    """Return ``text``; ``name`` is its name in the error. Raises UsageError for bytes that are not UTF-8, which the
    command line and the environment pass as surrogates (PEP 383)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"The text of {name} is not UTF-8; convert it, or set the terminal to UTF-8.") from None
    return text


def shortened(tokenizer: Any, text: str, limit: int) -> tuple[str, int]:
    """Return the first ``limit`` tokens of ``text`` as text, and the number of tokens of the whole text."""
    with encoding(text):
        encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
    count = len(encoded.input_ids)
    return (text, count) if count <= limit else (text[: encoded.offset_mapping[limit - 1][1]], count)


def encode(tokenizer: Any, messages: Messages, *, raw: bool = False, answer: str = "") -> list[int]:
    """Return the token ids of a conversation up to the next answer, and of the beginning of that answer.

    A model with a chat template gets the filled template. A base model (and ``raw``) gets the contents as plain text.
    Names of special tokens in messages are encoded as text and end no turn; in a ``raw`` prompt they are tokens.
    Raises UsageError for text that is not UTF-8, and if the model's template rejects the conversation or leaves out a
    message.
    """
    return prompt_text(tokenizer, messages, raw=raw, answer=answer).ids(tokenizer)


def prompt_text(tokenizer: Any, messages: Messages, *, raw: bool = False, answer: str = "") -> PromptText:
    """Return the text of a conversation, as :func:`encode` encodes it. Raises UsageError as it does."""
    for message in messages:
        check_text(message["content"], "the prompt")
    template = not raw and getattr(tokenizer, "chat_template", None)
    if template:
        chat = _chat(tokenizer, messages)
        return replace(chat, begins=_lacks_beginning(tokenizer, chat)) + as_data(tokenizer, answer)
    text = "\n\n".join(message["content"] for message in messages) + answer
    return PromptText(text) if raw else as_data(tokenizer, text)


def _chat(tokenizer: Any, messages: Messages) -> PromptText:
    """Return the text of a chat template. It is filled with a mark for each name of a special token in a message: a
    private-use character that occurs in no message."""
    pattern = special_names(tokenizer)
    found = () if pattern is None else (hit[0] for one in messages for hit in pattern.finditer(one["content"]))
    hits = dict.fromkeys(found)
    if pattern is None or not hits:
        return PromptText(fill(tokenizer, messages), begins=False)
    known = set().union(*(one["content"] for one in messages))
    free = (chr(code) for code in chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)) if chr(code) not in known)
    marks = dict(zip(hits, free, strict=False))
    marked = [one | {"content": pattern.sub(lambda hit: marks[hit[0]], one["content"])} for one in messages]
    names: dict[str, str] = {mark: name for name, mark in marks.items()}
    text, data, length = list[str](), list[tuple[int, int]](), 0
    for part in _parts(f"[{''.join(names)}]", fill(tokenizer, marked)):
        text.append(names.get(part, part))
        if part in names:
            data.append((length, length + len(text[-1])))
        length += len(text[-1])
    return PromptText("".join(text), data, begins=False)


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


def fill(tokenizer: Any, messages: Messages) -> str:
    """Return the text of a conversation up to its answer. Raises UsageError if the template rejects the conversation,
    leaves a message out or takes too many steps."""
    try:
        form = _form(tokenizer, tokenizer.get_chat_template(), tuple(one["role"] for one in messages))
        text = _in_form(tokenizer, messages, form.parts)
    except TemplateTooCostly:
        raise
    except Exception as error:  # a template is the model's code and may raise anything
        if ran_out_of_memory(error):
            raise out_of_memory("a chat template", error) from error
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        system = any(message["role"] == "system" for message in messages)
        remedy = "leave the system prompt out" if system else "give a plain prompt (--raw) or take another model"
        raise UsageError(f"The model's chat template does not take this conversation ({first}); {remedy}.") from error
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


def _in_form(tokenizer: Any, messages: Messages, parts: bool) -> str:
    given: list[Any] = [
        one | {"content": [{"type": "text", "text": one["content"]}]} if parts else one for one in messages
    ]
    return filled(tokenizer, given)


def question(text: str | None, prompt: str | None) -> Messages:
    """Return the user's message with ``text`` (if any) and ``prompt``. Raises UsageError if both are empty, or if the
    prompt is not UTF-8."""
    check_text(prompt or "", "the prompt")
    parts = [part for part in (text, prompt) if part and part.strip()]
    if not parts:
        raise UsageError("There is nothing to answer: give a prompt (--prompt) or a text (--file).")
    return [{"role": "user", "content": "\n\n".join(parts)}]
