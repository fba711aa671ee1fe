"""Decodes tokens to text piece by piece, and finds the strings that end an answer."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from itertools import islice
from typing import Any

from kvkeep.engine.token_spelling import TokenSpelling, special_ids, token_spelling

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the text of an incomplete character
_CONTEXT = 8
"""The number of tokens before a text that are decoded with it: its first character may have begun in them, and some
tokenizers write a space between two tokens, but none before the first."""
LONGEST_PART = 8
"""The number of tokens after which :class:`WindowPieces` shows an incomplete character."""


class BytePieces:
    """Pieces of tokens whose bytes are known. No token is decoded twice."""

    def __init__(self, table: TokenSpelling, before: Sequence[int], special: bool) -> None:
        self._table, self._special = table, special
        self._begins = False  # whether a space that comes next is no part of the text
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(self.data, before[-_CONTEXT:])))
        self._begins = table.prefix and not before if special else table.begins(before)

    @property
    def withheld(self) -> int:
        """The number of bytes of an incomplete character at the end, which is not returned yet."""
        return len(self._decoder.getstate()[0])

    def add(self, tokens: Sequence[int]) -> str:
        """Append tokens, and return the text that they complete."""
        return "".join(map(self._add, tokens))

    def _add(self, token: int) -> str:
        data = self.data(token)
        self._begins = self._begins and not self._content(token)
        return self._decoder.decode(data)

    def rest(self) -> str:
        """Return the remaining text: an incomplete character, as U+FFFD."""
        return self._decoder.decode(b"", True)

    def data(self, token: int, named: bool = False) -> bytes:
        """Return the bytes that a token adds if it is the next one. named: a special token adds its name."""
        data = self._table[token] if named else self._content(token)
        return data.removeprefix(b" ") if self._begins else data

    def _content(self, token: int) -> bytes:
        """Return the bytes of a token wherever it stands in a text."""
        return b"" if token in self._table.special and not self._special else self._table[token]


class WindowPieces:
    """Pieces of any tokenizer's tokens, which are decoded together with a few tokens before them."""

    def __init__(self, tokenizer: Any, before: Sequence[int], special: bool) -> None:
        self._tokenizer, self._skips = tokenizer, not special
        skipped = () if special else special_ids(tokenizer)
        self._ids = [*islice((one for one in reversed(before) if one not in skipped), _CONTEXT)][::-1]
        self._given = len(self._ids)  # the number of ids whose text was returned

    @property
    def withheld(self) -> int:
        """The number of tokens of an incomplete character at the end, which is not returned yet."""
        return len(self._ids) - self._given

    def add(self, tokens: Sequence[int]) -> str:
        """Append tokens, and return the text that they complete."""
        self._ids.extend(tokens)
        text = self._text(self._ids)
        if text.endswith(_INCOMPLETE) and len(self._ids) - self._given < LONGEST_PART:
            return ""
        return self._fresh(text)

    def rest(self) -> str:
        """Return the remaining text: an incomplete character, as U+FFFD."""
        return self._fresh(self._text(self._ids))

    def data(self, token: int, named: bool = False) -> bytes:
        """Return the bytes that a token adds if it is the next one. named: a special token adds its name. The last
        token of a character adds all its bytes, because such a tokenizer does not tell those of parts."""
        known, text = (self._text(ids, not named) for ids in (self._ids[: self._given], [*self._ids, token]))
        fresh = text[len(known.rstrip(_INCOMPLETE)) :]
        return b"" if fresh.endswith(_INCOMPLETE) and not named else fresh.encode()

    def _fresh(self, text: str) -> str:
        fresh = text[len(self._text(self._ids[: self._given]).rstrip(_INCOMPLETE)) :]
        self._ids = self._ids[-_CONTEXT:] if fresh else self._ids[: self._given]  # tokens without text are no context
        self._given = len(self._ids)
        return fresh

    def _text(self, ids: Sequence[int], skips: bool = True) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skips and skips))


Pieces = BytePieces | WindowPieces
"""The text of tokens, decoded as they arrive. The last token of a character returns the character."""


def pieces_of(tokenizer: Any, before: Sequence[int] = (), special: bool = False) -> Pieces:
    """Return the pieces of a text that follows the tokens ``before``: the text of all tokens without the text of
    ``before``. The space that the tokenizer puts at the beginning of a text is no part of it
    (:meth:`~kvkeep.engine.token_spelling.TokenSpelling.begins`). special: special tokens have their names; otherwise
    they have no text."""
    table = token_spelling(tokenizer)
    return WindowPieces(tokenizer, before, special) if table is None else BytePieces(table, before, special)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return each token's part of the text, special ones with their names. If several tokens form one character, the
    last token has it."""
    pieces = pieces_of(tokenizer, special=True)
    texts = [pieces.add([one]) for one in ids]
    return [*texts[:-1], texts[-1] + pieces.rest()] if texts else []


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
