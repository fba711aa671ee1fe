"""Prompt lookup: drafts are copied from the text after an earlier occurrence of the last tokens (Saxena, 2023)."""

from __future__ import annotations

from collections.abc import Iterable

GRAM = 3
"""The number of tokens that must match."""


class Lookup:
    """The tokens of one row, indexed by trigram."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # trigram: index after its last occurrence
        self._source: int | None = None  # index after the previous occurrence of the last trigram
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Append a token."""
        self._tokens.append(token)
        gram = tuple(self._tokens[-GRAM:])
        self._source = self._after.get(gram)
        self._after[gram] = len(self._tokens)

    def run(self, length: int) -> list[int]:
        """Return the ``length`` tokens after the previous occurrence, or an empty list. A copy that reaches the end
        repeats."""
        if self._source is None:
            return []
        period = len(self._tokens) - self._source
        return [self._tokens[self._source + number % period] for number in range(length)]
