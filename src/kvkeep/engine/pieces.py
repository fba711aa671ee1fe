"""The text of an answer: decoded piece by piece, ended by stop strings, and reported with log-probabilities."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvkeep.engine.token_spelling import TokenSpelling, special_ids, token_spelling

if TYPE_CHECKING:
    from torch import Tensor

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


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer and its log-probability."""

    token: int
    text: str
    """The token's part of the answer's text. If several tokens form one character, the last token has it. Text that a
    stop string cuts off belongs to no token."""
    data: bytes
    """The token's own bytes: those of all tokens form the UTF-8 of the answer's text. A special token has none."""
    logprob: float
    top: tuple[tuple[int, bytes, float], ...]
    """The likeliest tokens: id, bytes that the token would add (a special token: its name), log-probability."""


@dataclass(frozen=True)
class TextPiece:
    """A piece of an answer's text, and the log-probabilities of the tokens since the last piece."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class _Pending:
    """A token whose bytes are not all reported."""

    logprob: TokenLogprob
    start: int
    """Characters of the answer's text before the token's part."""
    end: int
    """Characters of the answer's text that have to be reported before the token is."""
    from_earlier: int
    """Bytes of the part's first character that belong to earlier tokens."""

    def cut(self, characters: int) -> TokenLogprob:
        """Return the token without what follows the first ``characters`` of the answer's text."""
        text = self.logprob.text[: characters - self.start]
        return replace(
            self.logprob, text=text, data=self.logprob.data[: max(0, len(text.encode()) - self.from_earlier)]
        )


class AnswerText:
    """The text of an answer: it is decoded as tokens arrive, ends before a stop string, and is reported in pieces with
    its tokens' log-probabilities.

    before: the tokens of the prompt. stops: strings that end the text and are not part of it. top_logprobs: the number
    of likeliest tokens reported with each token; None: no log-probabilities. listener: called with each piece.
    """

    def __init__(
        self,
        tokenizer: Any,
        before: Sequence[int],
        stops: Sequence[str],
        top_logprobs: int | None,
        listener: Callable[[TextPiece], None],
    ) -> None:
        self._pieces, self._stops = pieces_of(tokenizer, before), Stops(stops)
        self._top, self._listener = top_logprobs, listener
        self._texts: list[str] = []  # the reported text
        self._decoded = self._shown = 0  # characters of the text that were decoded, and reported
        self._pending = deque[_Pending]()

    def __str__(self) -> str:
        """Return the reported text."""
        return "".join(self._texts)

    @property
    def stopped(self) -> str | None:
        """The stop string that was found; None: none."""
        return self._stops.met

    def add(self, token: int, logits: Tensor | None) -> None:
        """Append a token, chosen by ``logits`` (vocabulary,), and report the text that it completes."""
        from_earlier, start = self._pieces.withheld, self._decoded
        made = None if self._top is None or logits is None else self._logprob(token, logits, self._top)
        text = self._pieces.add([token])
        self._decoded += len(text)
        if made is not None:
            end = self._decoded + bool(self._pieces.withheld)
            self._pending.append(_Pending(replace(made, text=text), start, end, from_earlier))
        self._report(self._stops.add(text))

    def _logprob(self, token: int, logits: Tensor, top: int) -> TokenLogprob:
        """Return the log-probability of a token chosen by ``logits`` (vocabulary,), with those of the ``top`` likeliest
        tokens. The token is not in the text yet."""
        logs = logits.float().log_softmax(-1)
        best = logs.topk(top)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        likely = tuple((one, self._pieces.data(one, named=True), value) for one, value in pairs)
        return TokenLogprob(token, "", self._pieces.data(token), float(logs[token]), likely)

    def end(self) -> None:
        """Report the rest of the text and of the tokens."""
        if not self.stopped:
            rest = self._pieces.rest()
            self._decoded += len(rest)
            if rest and self._pending:
                last = self._pending.pop()
                self._pending.append(replace(last, logprob=replace(last.logprob, text=last.logprob.text + rest)))
            self._report(self._stops.add(rest))
            self._report("" if self.stopped else self._stops.rest())
        cut = [one.cut(self._shown) for one in [*self._pending][:1]]  # only the first can begin in the reported text
        left = tuple(one for one in cut if one.data) if self.stopped else tuple(one.logprob for one in self._pending)
        if left:
            self._listener(TextPiece("", left))

    def _report(self, text: str) -> None:
        """Report some text, and the tokens whose bytes it has."""
        if not text:
            return
        self._texts.append(text)
        self._shown += len(text)
        done = list[TokenLogprob]()
        while self._pending and self._pending[0].end <= self._shown:
            done.append(self._pending.popleft().logprob)
        self._listener(TextPiece(text, tuple(done)))
