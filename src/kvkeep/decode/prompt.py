"""Prompts: from a text and a question to token ids."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from kvkeep.errors import EmptyText, UsageError, reason_of

Messages = list[dict[str, str]]


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
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
    count = len(encoded.input_ids)
    return (text, count) if count <= limit else (text[: encoded.offset_mapping[limit - 1][1]], count)


def encode(tokenizer: Any, messages: Messages, *, raw: bool = False) -> list[int]:
    """Return the token ids of a conversation up to the next answer.

    A model with a chat template gets the filled template. A base model (and ``raw``) gets the contents as plain text.
    If a message within a template contains the name of a special token, the name is encoded as text and ends no turn.
    Raises UsageError for text that is not UTF-8, and if the model's template rejects the conversation.
    """
    for message in messages:
        check_text(message["content"], "the prompt")
    if raw or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer("\n\n".join(message["content"] for message in messages)).input_ids)
    spelt = _spelt(tokenizer, messages)
    try:
        if spelt:
            return _as_text(tokenizer, messages, spelt)
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except Exception as error:  # a template is the model's code and may raise anything
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        system = any(message["role"] == "system" for message in messages)
        remedy = "leave the system prompt out" if system else "give a plain prompt (--raw) or take another model"
        raise UsageError(f"The model's chat template does not take this conversation ({first}); {remedy}.") from error
    return list(encoded["input_ids"])


def written_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of an answer's text, to continue it. Names of special tokens in it are encoded as text."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)


def _spelt(tokenizer: Any, messages: Messages) -> list[str]:
    """Return the names of special tokens that occur in messages, each once."""
    pattern = _special(tokenizer)
    if pattern is None:
        return []
    return [*dict.fromkeys(hit for message in messages for hit in pattern.findall(message["content"]))]


@lru_cache(maxsize=4)
def _special(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of the names of a tokenizer's special tokens; None if it has none."""
    names = {one.content for one in tokenizer.added_tokens_decoder.values() if one.special and one.content}
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None


def _as_text(tokenizer: Any, messages: Messages, spelt: list[str]) -> list[int]:
    """Return the token ids of a conversation whose messages contain names of special tokens. The template is filled
    with a placeholder for each name: a private-use character that occurs in no message. The text between placeholders
    is encoded as usual."""
    joined = "".join(message["content"] for message in messages)
    free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in joined)
    marks = dict(zip(spelt, free, strict=False))
    pattern = _special(tokenizer)
    assert pattern is not None
    marked = [one | {"content": pattern.sub(lambda hit: marks[hit[0]], one["content"])} for one in messages]
    text = tokenizer.apply_chat_template(marked, add_generation_prompt=True, tokenize=False)
    stands = {mark: name for name, mark in marks.items()}
    ids: list[int] = []
    for part in re.split(f"([{''.join(stands)}])", text):
        special = stands.get(part)
        ids += tokenizer(special or part, add_special_tokens=False, split_special_tokens=special is not None).input_ids
    return ids


def question(text: str | None, prompt: str | None) -> Messages:
    """Return the user's message with ``text`` (if any) and ``prompt``. Raises UsageError if both are empty, or if the
    prompt is not UTF-8."""
    check_text(prompt or "", "the prompt")
    parts = [part for part in (text, prompt) if part and part.strip()]
    if not parts:
        raise UsageError("There is nothing to answer: give a prompt (--prompt) or a text (--file).")
    return [{"role": "user", "content": "\n\n".join(parts)}]
