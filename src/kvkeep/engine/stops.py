"""Strings that end a text which arrives in parts."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Text up to the first stop string. Text arrives in parts; an end that could begin a stop string is withheld."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings, self._waiting = [one for one in strings if one], ""
        self.met: str | None = None
        """The stop string that was found; None: none yet."""

    def add(self, text: str) -> str:
        """Return the text before the first stop string; set ``met`` if there is one."""
        text = self._waiting + text
        starts = [(start, one) for one in self._strings if (start := text.find(one)) >= 0]
        if starts:
            start, self.met = min(starts)
            self._waiting = ""
            return text[:start]
        withheld = max((begun(text, one) for one in self._strings), default=0)
        self._waiting = text[len(text) - withheld :]
        return text[: len(text) - withheld]

    def rest(self) -> str:
        """Return the withheld text, after which no stop string followed."""
        text, self._waiting = self._waiting, ""
        return text


def begun(text: str, string: str) -> int:
    """Return the length of the longest proper prefix of ``string`` that ``text`` ends with."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
