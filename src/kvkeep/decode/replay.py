"""Exact replay: an answer that a client sends back becomes the tokens that were generated.

A template writes an answer otherwise than it was generated (spaces, the order of keys, escapes), and a text has many
tokenizations. From the first other token on, a cache has to read again. So the tokens of an answer are remembered by
what it says, and stand in the prompt in the place of what the template writes for it.

A template may leave an answer's reasoning out. Then its tokens are left out, too, and the rest is read again: it came
after them.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvkeep.engine.pieces import token_texts

_FIRST_TOKENS, _FIRST_CHARACTERS = 16, 8
"""The beginning of an answer by which it is found in what the template writes: two templates' calls differ later."""


@dataclass(frozen=True)
class Generated:
    """An answer as it was generated."""

    ids: Sequence[int]
    """Its tokens, without one that ended it."""
    spoken: int = 0
    """The number of the first of them that is not a part of its reasoning."""
    reasoning: str = ""
    """The text of its reasoning."""


def answer_key(message: Mapping[str, Any]) -> str:
    """Return a digest of what an answer says besides its reasoning: its text and its calls, without their ids."""
    functions = [one["function"] for one in message.get("tool_calls", ())]
    calls = [[one["name"], one["arguments"]] for one in functions]
    said = json.dumps([message["content"].strip(), calls], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def bodies(text: str, marked: str, mark: str, count: int) -> list[tuple[int, int]] | None:
    """Return the place in a template's ``text`` of what it writes for each of ``count`` messages.

    marked: the same with ``mark``, the message's number and ``mark`` for the content of each message. None: the two
    have no other parts in common, or a message has what the template writes between two.
    """
    numbers = re.findall(f"{mark}(\\d+){mark}", marked)
    if [*map(int, numbers)] != [*range(count)]:
        return None
    first, *between = re.split(f"{mark}\\d+{mark}", marked)
    if not text.startswith(first):
        return None
    found, start = list[tuple[int, int]](), len(first)
    for number, one in enumerate(between):
        end = text.find(one, start) if number + 1 < count else len(text) - len(one)
        if end < start or not text.startswith(one, end):
            return None
        found.append((start, end))
        start = end + len(one)
    end = found[-1][1] if found else 0
    for number in range(count - 1, 0, -1):  # from the end, the same places are found unless there are several
        before = between[number - 1]
        end = text.rfind(before, 0, end)
        if end + len(before) != found[number][0]:
            return None
    return found


def replayed(tokenizer: Any, body: str, message: Mapping[str, Any], known: Generated) -> tuple[int, Sequence[int]]:
    """Return the place in a message's ``body`` at which the tokens of the answer begin, and these tokens; they end
    with the body. No tokens: the template writes something else than the answer."""
    functions = [one["function"]["name"] for one in message.get("tool_calls", ())]
    if not all(one in body for one in (message["content"].strip(), *functions)):
        return 0, ()
    dropped = known.reasoning and known.reasoning.strip() not in body
    if dropped and not known.spoken:
        return 0, ()
    ids = known.ids[known.spoken :] if dropped else known.ids
    first = "".join("".join(token_texts(tokenizer, ids[:_FIRST_TOKENS])).split())[:_FIRST_CHARACTERS]
    hit = re.search(r"\s*".join(map(re.escape, first)), body) if first else None
    if hit is None:
        return 0, ()
    return (hit.start() if body[: hit.start()].strip() else 0), ids  # spaces before an answer are the template's


def spoken_after(texts: Sequence[str], reasoning: str, end: str) -> int:
    """Return the number of the first token after an answer's ``reasoning`` and the mark at its ``end``, of tokens with
    these ``texts``; 0: a token has parts of both."""
    text, starts = "".join(texts), _starts(texts)
    place = _reasoning_end(text, reasoning, end)
    if place < 0:
        return 0
    place += len(text[place:]) - len(text[place:].lstrip())
    return starts.index(place) if place in starts else 0


def reasoning_tokens(texts: Sequence[str], reasoning: str, end: str) -> int:
    """Return how many of an answer's tokens, with these ``texts``, have parts of its ``reasoning`` or of the mark at
    its ``end``. An answer that ends within its reasoning has no others."""
    place = _reasoning_end("".join(texts), reasoning, end)
    return len(texts) if place < 0 else bisect_left(_starts(texts), place)


def _reasoning_end(text: str, reasoning: str, end: str) -> int:
    """Return the place in an answer's ``text`` after its ``reasoning`` and the mark at its ``end``; -1: none."""
    place = text.find(end, text.find(reasoning) + len(reasoning))
    return place + len(end) if place >= 0 else -1


def _starts(texts: Sequence[str]) -> list[int]:
    """Return the place of each of ``texts`` in all of them, and the length of all."""
    return [*accumulate(map(len, texts), initial=0)]
