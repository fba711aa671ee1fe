"""Decodes tokens to text piece by piece, and finds the strings that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the text of an incomplete character
LONGEST_PART = 8
"""The number of tokens after which an incomplete character is shown: a character has at most four bytes."""


class Pieces:
    """The text of an answer, decoded as its tokens arrive. The last token of a character returns the character.
    written: tokens of the answer whose text was returned earlier."""

    def __init__(self, tokenizer: Any, written: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._line = [*written]  # ids of the current line; only this line is decoded again
        self._given = len(self._text().rstrip(_INCOMPLETE)) if written else 0  # characters of the line already returned

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
        """Return the remaining text, even if its last character is incomplete."""
        fresh, self._line, self._given = self._text()[self._given :], [], 0
        return fresh

    def _text(self) -> str:
        return self._tokenizer.decode(self._line, skip_special_tokens=True)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return each token's part of the text. If several tokens form one character, the last token has it."""
    texts, start, given = [], 0, 0  # ids from start are decoded together; those before ``given`` have their texts

    def text(stop: int) -> str:
        return str(tokenizer.decode(ids[start:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    for stop in range(1, len(ids) + 1):
        known, so_far = text(given), text(stop)
        half = so_far.endswith(_INCOMPLETE) and stop < len(ids) and stop - given < LONGEST_PART
        if half:
            texts.append("")
            continue
        texts.append(so_far[len(known) :])
        # Keep the previous token in the context: some tokenizers drop the space at the start of a text.
        start, given = given, stop
    return texts


class Stops:
    """Text up to the first stop string. Text arrives in parts; an end that could begin a stop string is withheld."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings, self._waiting = [one for one in strings if one], ""
        self.met = False

    def add(self, text: str) -> str:
        """Return the text before the first stop string; set ``met`` if there is one."""
        text = self._waiting + text
        starts = [start for one in self._strings if (start := text.find(one)) >= 0]
        if starts:
            self._waiting, self.met = "", True
            return text[: min(starts)]
        withheld = max((_begun(text, one) for one in self._strings), default=0)
        self._waiting = text[len(text) - withheld :]
        return text[: len(text) - withheld]

    def rest(self) -> str:
        """Return the withheld text, after which no stop string followed."""
        text, self._waiting = self._waiting, ""
        return text


def _begun(text: str, string: str) -> int:
    """Return the length of the longest proper prefix of ``string`` that ``text`` ends with."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
