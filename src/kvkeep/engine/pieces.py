"""Tokens to text, piece by piece, and the strings that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of a part of a character
LONGEST_PART = 8
"""Tokens after which half a character is shown as it is: no character has more than four bytes."""


class Pieces:
    """The text of an answer as its tokens arrive. A character of several tokens is returned with the last of them.
    written: tokens of the answer whose text was returned earlier."""

    def __init__(self, tokenizer: Any, written: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._line = [*written]  # ids of the line: only this is decoded again
        self._given = len(self._text().rstrip(_INCOMPLETE)) if written else 0  # characters of it that were given

    def add(self, tokens: Sequence[int]) -> str:
        """Append tokens, and return the text that they complete."""
        self._line.extend(tokens)
        text = self._text()
        if text.endswith(_INCOMPLETE):
            return ""
        fresh, self._given = text[self._given :], len(text)
        if text.endswith("\n"):
            self._line, self._given = [], 0
        return fresh

    def rest(self) -> str:
        """Return the remaining text, complete or not."""
        fresh, self._line, self._given = self._text()[self._given :], [], 0
        return fresh

    def _text(self) -> str:
        return self._tokenizer.decode(self._line, skip_special_tokens=True)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return each token's part of the text. Where several tokens make one character, the last of them has it."""
    texts, start, given = [], 0, 0  # ids from start are decoded together, and those before ``given`` have their texts

    def text(stop: int) -> str:
        return str(tokenizer.decode(ids[start:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    for stop in range(1, len(ids) + 1):
        known, so_far = text(given), text(stop)
        half = so_far.endswith(_INCOMPLETE) and stop < len(ids) and stop - given < LONGEST_PART
        if half:
            texts.append("")
            continue
        texts.append(so_far[len(known) :])
        # The token before stays in view: some tokenizers drop the space at the start of what they decode.
        start, given = given, stop
    return texts


class Stops:
    """Text up to the first stop string. Text arrives in parts; an end that could begin a stop string is held back."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings, self._waiting = [one for one in strings if one], ""
        self.met = False

    def add(self, text: str) -> str:
        """Return the text that precedes every stop string; set ``met`` when one of them is found."""
        text = self._waiting + text
        starts = [start for one in self._strings if (start := text.find(one)) >= 0]
        if starts:
            self._waiting, self.met = "", True
            return text[: min(starts)]
        withheld = max((_begun(text, one) for one in self._strings), default=0)
        self._waiting = text[len(text) - withheld :]
        return text[: len(text) - withheld]

    def rest(self) -> str:
        """Return the text that was held back; no stop string followed."""
        text, self._waiting = self._waiting, ""
        return text


def _begun(text: str, string: str) -> int:
    """Return how many characters of ``string`` the end of ``text`` begins with, fewer than all."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
