"""Bodies that cost a server the most that it can be asked for: what it refuses, and the largest that it takes."""

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
    "1,000,000 empty parts": Worst(CHAT, 400, chat("{}"), 3 * MB),
    "empty lists": Worst(CHAT, 400, chat("[]")),
    "parts": Worst(CHAT, 400, chat('{"type":"text","text":""}')),
    "many parts": Worst(CHAT, 400, chat('{"type":"text","text":""}'), 1_700_000),
    "10,000 messages of 100 parts": Worst(CHAT, 413, messages(100)),
    "10,000 messages of 25 parts": Worst(CHAT, 400, messages(25)),
    "wrong messages": Worst(CHAT, 400, lambda model, size: filled('{"messages":[', '{"role":"x"}', "]}", size)),
    "nested lists": Worst(CHAT, 400, lambda model, size: b"[" * size),
    "nested objects": Worst(CHAT, 400, lambda model, size: b'{"a":' * (size // 5)),
    "unknown fields": Worst(CHAT, 400, names),
    "159,000 unknown fields": Worst(CHAT, 400, names, 159_000 * 12),
    "a long name": Worst(CHAT, 400, lambda model, size: b'{"' + b"x" * size + b'":1}'),
    "one name": Worst(CHAT, 400, lambda model, size: filled("{", '"a":1', "}", size)),
    "stop strings": Worst(CHAT, 400, field('"stop":[', '"a"', "]")),
    "tools": Worst(CHAT, 400, field('"tools":[', "{}", "]")),
    "119,000 tools": Worst(CHAT, 400, field('"tools":[', "{}", "]"), 119_000 * 3),
    "logit_bias": Worst(CHAT, 400, field('"logit_bias":{', '"1":1', "}")),
    "metadata": Worst(CHAT, 400, field('"metadata":{"a":[', '"b"', "]}")),
    "digits": Worst(CHAT, 400, field('"seed":', "1" * 7 * MB, "")),
    "digits of a fraction": Worst(CHAT, 400, field('"temperature":0.', "9" * 7 * MB, ',"x":1')),
    "no JSON": Worst(CHAT, 400, lambda model, size: b"x" * size),
    "a model's name": Worst(CHAT, 400, lambda model, size: b'{"messages":[],"model":"' + b"x" * size + b'"}'),
    "ids": Worst(TEXT, 400, prompt("7")),
    "1,100,000 ids": Worst(TEXT, 400, prompt("7"), 2_200_000),
    "prompts": Worst(TEXT, 400, prompt("[]")),
    "words": Worst(TEXT, 400, text("the ")),
    "escapes": Worst(TEXT, 400, text("\n")),
    "other letters": Worst(TEXT, 400, text("é ß 語 "), 6 * MB),
    "spaces": Worst(TEXT, 400, text(" ")),
    "10,000 messages of 5 parts": Worst(CHAT, 400, messages(5, 100)),
    "a long message": Worst(CHAT, 400, text("the sea ", "messages")),
    "names of special tokens": Worst(CHAT, 400, text("<|im_end|>", "messages")),
}
"""By name: what no model answers, whatever its context."""
TAKEN = {
    "words": Worst(TOKENIZE, 200, text("the sea and "), 3_900_000),
    "other letters": Worst(TOKENIZE, 200, text("é語ø"), 1_300_000),
    "one word": Worst(TOKENIZE, 200, text("a"), 3_900_000),
    "spaces": Worst(TOKENIZE, 200, text(" "), 4 * MB),
    "escapes": Worst(TOKENIZE, 200, text("\n")),
    "names of special tokens": Worst(TOKENIZE, 200, text("<|im_end|>"), 4 * MB),
    "messages with names of special tokens": Worst(TOKENIZE, 200, text("<|im_end|>", "messages"), 1_500_000),
    "a long message": Worst(TOKENIZE, 200, text("the sea ", "messages"), 3_900_000),
    "10,000 messages of 5 parts": Worst(TOKENIZE, 200, messages(5, 20), 0),
}
"""By name: the largest bodies that are answered."""
