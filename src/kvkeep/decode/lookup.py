"""Prompt lookup: drafts copied from where the last few tokens were seen before (Saxena, 2023)."""

from __future__ import annotations

from collections.abc import Iterable

GRAM = 3
"""Tokens that must agree."""


class Lookup:
    """The tokens of one row, and after which of their trigrams what came last time."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # of each trigram's last occurrence, the place behind it
        self._source: int | None = None  # the same for the occurrence before the one at the end
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Take the next token."""
        self._tokens.append(token)
        gram = tuple(self._tokens[-GRAM:])
        self._source = self._after.get(gram)
        self._after[gram] = len(self._tokens)

    def run(self, length: int) -> list[int]:
        """Return the ``length`` tokens that followed last time, or nothing. What repeats goes on repeating."""
        if self._source is None:
            return []
        period = len(self._tokens) - self._source
        return [self._tokens[self._source + number % period] for number in range(length)]
