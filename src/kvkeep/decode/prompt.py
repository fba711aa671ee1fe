"""Prompts: from a text and a question to token ids."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvkeep.errors import UsageError

Messages = list[dict[str, str]]


def read_text(path: str) -> str:
    """Return the text of a file, or of standard input for ``-``; raises UsageError if there is none to read."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"The file '{path}' cannot be read: {(error.strerror or str(error)).lower()}.") from error
    name = "standard input" if path == "-" else f"the file '{path}'"
    if b"\0" in data:
        raise UsageError(f"There is no text in {name}: it is binary; give a text file (UTF-8).")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"The text of {name} is not UTF-8 (byte {error.start}); convert it first.") from error
    if not text.strip():
        raise UsageError(f"There is no text in {name}: it is empty.")
    return text


def shortened(tokenizer: Any, text: str, limit: int) -> tuple[str, int]:
    """Return the first ``limit`` tokens of ``text`` as text, and how many tokens the whole has."""
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
    count = len(encoded.input_ids)
    return (text, count) if count <= limit else (text[: encoded.offset_mapping[limit - 1][1]], count)


def encode(tokenizer: Any, messages: Messages, *, raw: bool = False) -> list[int]:
    """Return the token ids of a conversation, ready for the next answer.

    Models with a chat template get it; base models (and ``raw``) get the contents as plain text.
    """
    if raw or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer("\n\n".join(message["content"] for message in messages)).input_ids)
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def question(text: str | None, prompt: str | None) -> Messages:
    """Return the user's message about ``text``, if any."""
    parts = [part for part in (text, prompt) if part and part.strip()]
    if not parts:
        raise UsageError("There is nothing to answer: give a prompt (--prompt) or a text (--file).")
    return [{"role": "user", "content": "\n\n".join(parts)}]
