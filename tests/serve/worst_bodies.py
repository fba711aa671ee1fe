"""Bodies that cost a server the most that it can be asked for: what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from running import CHAT, TEXT

TOKENIZE = "/tokenize"
MB = 10**6


@dataclass(frozen=True)
class Worst:
    """A body, where it is sent, and what becomes of it."""

    path: str
    status: int
    make: Callable[[str, int], bytes]
    """The body for a model's name and a number of bytes."""
    size: int = 8 * MB - 10_000


def filled(head: str, one: str, tail: str, size: int) -> bytes:
    """Return as many of a part as fit, separated by commas."""
    count = (size - len(head) - len(tail)) // (len(one.encode()) + 1)
    return (head + ",".join([one] * count) + tail).encode()


def chat(content: str, before: str = "") -> Callable[[str, int], bytes]:
    """Return a conversation of one message, with as many of an element of its content as fit."""

    def make(model: str, size: int) -> bytes:
        return filled(f'{{"model":"{model}",{before}"messages":[{{"role":"user","content":[', content, "]}]}", size)

    return make


def field(head: str, one: str, tail: str) -> Callable[[str, int], bytes]:
    """Return a short conversation, and a field with as many elements as fit."""

    def make(model: str, size: int) -> bytes:
        start = f'{{"model":"{model}","max_tokens":1,"messages":[{{"role":"user","content":"hi"}}],'
        return filled(start + head, one, tail + "}", size)

    return make


def prompt(one: str) -> Callable[[str, int], bytes]:
    """Return a prompt that is a list of as many of an element as fit."""
    return lambda model, size: filled(f'{{"model":"{model}","prompt":[', one, "]}", size)


def text(piece: str, where: str = "prompt") -> Callable[[str, int], bytes]:
    """Return a prompt, or the content of a message, of as many of a piece as fit."""

    def make(model: str, size: int) -> bytes:
        inner = json.dumps(piece, ensure_ascii=False)[1:-1]
        given: dict[str, Any] = {"model": model}
        given |= {"prompt": "TEXT"} if where == "prompt" else {"messages": [{"role": "user", "content": "TEXT"}]}
        body = json.dumps(given)
        return body.replace("TEXT", inner * ((size - len(body)) // len(inner.encode()))).encode()

    return make


def names(model: str, size: int) -> bytes:
    """Return a body of unknown fields."""
    return ("{" + ",".join(f'"x{number:06}":1' for number in range(size // 12)) + "}").encode()


def messages(parts: int, letters: int = 0) -> Callable[[str, int], bytes]:
    """Return 10,000 messages of some parts each, of so many letters."""

    def make(model: str, size: int) -> bytes:
        part = {"type": "text", "text": "a" * letters}
        both = [{"role": role, "content": [part] * parts} for role in ("user", "assistant")]
        return json.dumps({"model": model, "messages": both * 5000}, separators=(",", ":")).encode()

    return make


REFUSED = {
    "200,000 empty parts": Worst(CHAT, 400, chat("{}"), 600_000),
    "empty lists": Worst(CHAT, 400, chat("[]")),
    "10,000 messages of 100 parts": Worst(CHAT, 413, messages(100)),
    "nested lists": Worst(CHAT, 400, lambda model, size: b"[" * size),
    "unknown fields": Worst(CHAT, 400, names),
    "a long name": Worst(CHAT, 400, lambda model, size: b'{"' + b"x" * size + b'":1}'),
    "logit_bias": Worst(CHAT, 400, field('"logit_bias":{', '"1":1', "}")),
    "digits": Worst(CHAT, 400, field('"seed":', "1" * 7 * MB, "")),
    "no JSON": Worst(CHAT, 400, lambda model, size: b"x" * size),
    "ids": Worst(TEXT, 400, prompt("7")),
    "words": Worst(TEXT, 400, text("the ")),
    "escapes": Worst(TEXT, 400, text("\n")),
    "10,000 messages of 5 parts": Worst(CHAT, 400, messages(5, 100)),
    "names of special tokens": Worst(CHAT, 400, text("<|im_end|>", "messages")),
}
"""By name: what no model answers, whatever its context."""
