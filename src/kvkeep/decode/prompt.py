"""Prompts: from a text and a question to token ids."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

from kvkeep.decode.encoding import PromptText, as_data, encoding, special_names
from kvkeep.decode.template import Messages, fill
from kvkeep.errors import EmptyText, UsageError, reason_of


def read_text(path: str) -> str:
    """Return the text of a file, or of standard input for ``-``, without a byte order mark. Raises UsageError if there
    is no readable text, EmptyText if the file is empty."""
    try:
        data = standard_input().read() if path == "-" else Path(path).read_bytes()
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
        filled = _filled(tokenizer, messages)
        return replace(filled, begins=_lacks_beginning(tokenizer, filled)) + as_data(tokenizer, answer)
    text = "\n\n".join(message["content"] for message in messages) + answer
    return PromptText(text) if raw else as_data(tokenizer, text)


def _filled(tokenizer: Any, messages: Messages) -> PromptText:
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


def _lacks_beginning(tokenizer: Any, filled: PromptText) -> bool:
    """Return whether the text of a chat template lacks the token that begins a text, and the tokenizer adds it there:
    that of a GGUF file does, as llama.cpp's server."""
    named = filled.text.startswith(tokenizer.bos_token or "") and not (filled.data and filled.data[0][0] == 0)
    return getattr(tokenizer, "kvkeep_begins_chats", False) and not named


def question(text: str | None, prompt: str | None) -> Messages:
    """Return the user's message with ``text`` (if any) and ``prompt``. Raises UsageError if both are empty, or if the
    prompt is not UTF-8."""
    check_text(prompt or "", "the prompt")
    parts = [part for part in (text, prompt) if part and part.strip()]
    if not parts:
        raise UsageError("There is nothing to answer: give a prompt (--prompt) or a text (--file).")
    return [{"role": "user", "content": "\n\n".join(parts)}]
