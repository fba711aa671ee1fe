"""What an answer may copy next: what followed its last tokens earlier in the text, and a source that it rewrites."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GRAM = 3
"""The number of tokens that must match before a copy."""
OCCURRENCES = 8
"""The number of earlier occurrences of the last tokens that are compared, the newest first."""
LONGEST_MATCH = 32
"""The number of tokens before an occurrence that are compared."""
REACH = 16
"""The number of tokens of a source behind a change among which the answer may return to it."""
LONGEST_CHANGE = 6
"""The maximum number of tokens that a change replaces, and of those in their place."""


class CopiedText:
    """The tokens of a text. Its memory is that of the tokens: they are searched, and not indexed."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = np.array(tokens, np.int32)  # grows; the first `length` are the text
        self.length = len(tokens)
        self._occurrence: tuple[int, int] | None = None

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        stop = self.length + len(tokens)
        if stop > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * stop)
        self._tokens[self.length : stop] = tokens
        self.length, self._occurrence = stop, None

    def between(self, start: int, stop: int) -> list[int]:
        """Return the tokens from ``start`` to ``stop``, or to the end."""
        found: list[int] = self._tokens[start : min(stop, self.length)].tolist()
        return found

    def occurrence(self) -> tuple[int, int]:
        """Return the place behind the longest earlier occurrence of the last tokens, and the number of tokens that
        match before it; 0 where there is none."""
        if self._occurrence is None:
            text, end, place, longest = self._tokens[: self.length], self.length, 0, 0
            for start in reversed(self._starts(0, end - GRAM)[-OCCURRENCES:]):
                source = int(start) + GRAM
                limit = min(LONGEST_MATCH, source)
                same = text[source - limit : source][::-1] == text[end - limit : end][::-1]
                match = limit if same.all() else int(same.argmin())
                if match > longest:
                    place, longest = source, match
            self._occurrence = place, longest
        return self._occurrence

    def copy(self, count: int) -> tuple[Sequence[int], int]:
        """Return at most ``count`` tokens behind :meth:`occurrence`, and the number of tokens that match before them. A
        copy that reaches the end of the text repeats."""
        source, match = self.occurrence()
        if not match:
            return [], 0
        return self._tokens[source + np.arange(count) % (self.length - source)].tolist(), match

    def found(self, start: int, stop: int) -> int | None:
        """Return the first place from ``start`` to ``stop`` at which the last tokens begin, too; None: there is
        none."""
        starts = self._starts(start, min(stop, self.length - GRAM))
        return int(starts[0]) if len(starts) else None

    def _starts(self, start: int, stop: int) -> np.ndarray:
        """Return the places from ``start`` to ``stop`` at which the last :data:`GRAM` tokens begin, too."""
        hits = np.full(max(0, stop - start), True)
        for number in range(GRAM if len(hits) else 0):
            hits &= self._tokens[start + number : stop + number] == self._tokens[self.length - GRAM + number]
        return start + np.flatnonzero(hits)


class Rewriting:
    """A part of the ``text`` that its end writes again, with changes: the source. It is followed token by token. Where
    the text leaves it, and returns to it soon, the change is learned: tokens, and what was written in their place. The
    next copies have the same changes."""

    def __init__(self, text: CopiedText) -> None:
        self._text, self._changes = text, dict[tuple[int, ...], list[int]]()
        self._source: int | None = None  # the place of the next token
        self._inside = 0  # of a change whose tokens begin there, how many are written
        self._match = 0  # tokens since the source was found
        self._left: int | None = None  # where the text has left the source

    def copy(self, count: int) -> tuple[Sequence[int], int]:
        """Return at most ``count`` tokens of the source, with its changes, and the number of tokens for which it was
        followed. Nothing while the text differs from it."""
        if self._source is None or self._left is not None:
            return [], 0
        return self._next(self._source, count)[0], min(self._match, LONGEST_MATCH)

    def follow(self, count: int) -> None:
        """Compare the last ``count`` tokens of the text with the source."""
        text = self._text
        while self._source is not None and self._left is None:
            written = text.between(text.length - count, text.length)
            tokens, places = self._next(self._source, count)
            pairs = enumerate(zip(written, tokens, strict=False))
            right = next((number for number, (one, other) in pairs if one != other), min(count, len(tokens)))
            self._source, self._inside = places[right]
            self._match += right
            count -= right
            if not count:
                return
            changed = self._changed(text.between(self._source, self._source + LONGEST_CHANGE))
            if changed and not self._inside and written[right] == changed[0]:  # here it is not changed
                self._source, self._inside, count = self._source + 1, 0, count - 1
                continue
            self._left, self._inside = text.length - count - self._inside, 0
        if not self._returned():
            place, match = text.occurrence()
            if match:
                self._source, self._inside, self._match, self._left = place, 0, match, None

    def _returned(self) -> bool:
        """Return whether the text has returned to the source; what was changed is then learned."""
        text, start = self._text, self._text.length - GRAM
        if self._source is None or self._left is None or start < self._left:
            return False
        if (place := text.found(self._source, self._source + REACH)) is None:
            return False
        old, new = text.between(self._source, place), text.between(self._left, start)
        while old and new and old[-1] == new[-1]:
            del old[-1], new[-1]
        if 0 < len(old) <= LONGEST_CHANGE >= len(new):
            self._changes[tuple(old)] = new
        self._source, self._match, self._left = place + GRAM, GRAM, None
        return True

    def _next(self, source: int, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the next ``count`` tokens from ``source`` on, and the place of each and of the one behind them: where
        it lies in the source, and how many tokens of a change come before it there."""
        window, done = self._text.between(source, source + count + 2 * LONGEST_CHANGE), 0
        tokens, places = list[int](), list[tuple[int, int]]()
        while len(tokens) < self._inside + count and done < min(len(window), count + LONGEST_CHANGE):
            changed = self._changed(window[done : done + LONGEST_CHANGE])
            new = self._changes[changed] if changed else window[done : done + 1]
            tokens += new
            places += [(source + done, number) for number in range(len(new))]
            done += len(changed) or 1
        places.append((source + done, 0))
        chosen = slice(self._inside, self._inside + count)
        return tokens[chosen], places[self._inside : self._inside + count + 1]

    def _changed(self, window: list[int]) -> tuple[int, ...]:
        """Return the longest beginning of ``window`` that is changed; nothing where none is."""
        if not self._changes:
            return ()
        sizes = range(len(window), 0, -1)
        return next((old for size in sizes if (old := tuple(window[:size])) in self._changes), ())
