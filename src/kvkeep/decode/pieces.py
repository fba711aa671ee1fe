"""Tokens to text, piece by piece: what is certain by now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of a part of a character


class Pieces:
    """The text of an answer as its tokens come. A character of several tokens waits for its last one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._line: list[int] = []  # ids of the line: only this is decoded again
        self._given = 0  # characters of it that were given

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that ``tokens`` make certain."""
        self._line.extend(tokens)
        text = self._text()
        if text.endswith(_INCOMPLETE):
            return ""
        fresh, self._given = text[self._given :], len(text)
        if text.endswith("\n"):
            self._line, self._given = [], 0
        return fresh

    def rest(self) -> str:
        """Return what still waits, complete or not."""
        fresh, self._line, self._given = self._text()[self._given :], [], 0
        return fresh

    def _text(self) -> str:
        return self._tokenizer.decode(self._line, skip_special_tokens=True)


class Stops:
    """Text up to the first of some strings, which may come in parts: what could begin one waits."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings, self._waiting = [one for one in strings if one], ""
        self.met = False

    def add(self, text: str) -> str:
        """Return what is certain to be before any of the strings; sets ``met`` once one of them is there."""
        text = self._waiting + text
        starts = [start for one in self._strings if (start := text.find(one)) >= 0]
        if starts:
            self._waiting, self.met = "", True
            return text[: min(starts)]
        held = max((_begun(text, one) for one in self._strings), default=0)
        self._waiting = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return what waited, which is no string's beginning after all."""
        text, self._waiting = self._waiting, ""
        return text


def _begun(text: str, string: str) -> int:
    """Return how many characters of ``string`` the end of ``text`` begins with, fewer than all."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
