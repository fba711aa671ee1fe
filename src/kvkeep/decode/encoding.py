"""From a text to token ids, where some names of special tokens in the text are data.

No setting of the tokenizer is changed, so that several threads can use it at once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvkeep.engine.token_spelling import ALPHABET, SPACE
from kvkeep.errors import KvkeepError, ModelError, out_of_memory, ran_out_of_memory
from kvkeep.native.room import has_room

_CHARACTERS_PER_TOKEN = (1, 4, 16)
"""The lengths of beginnings, by the number of tokens that are looked for."""
_BESIDE_A_CUT = 256
"""More tokens than a cut adds to a text."""
Span = tuple[int, int]
"""The place of the first character, and of the first one after it."""
BYTES_PER_BYTE = 640
"""Memory that encoding takes at most for a byte of text. Measured with 1 MB of words, digits, CJK, emoji, punctuation,
names of special tokens and random letters: 100 to 534 bytes with SmolLM2's tokenizer, 67 to 146 with Gemma 3's."""
LEAST_BYTES = 16 << 20
"""Memory that encoding takes for a text of any length, with some to spare for what other threads do meanwhile."""


@dataclass(frozen=True)
class PromptText:
    """The text of a prompt."""

    text: str
    data: Sequence[Span] = ()
    """Names of special tokens that are data, in the order of the text."""
    begins: bool = True
    """Whether the tokenizer adds the special tokens that begin a text. The text of most chat templates has them."""

    def __add__(self, other: PromptText) -> PromptText:
        shift = len(self.text)
        moved = ((start + shift, stop + shift) for start, stop in other.data)
        return PromptText(self.text + other.text, [*self.data, *moved], self.begins)

    def beginning(self, length: int) -> PromptText:
        """Return the first ``length`` characters, without a name that is cut off."""
        return PromptText(self.text[:length], [span for span in self.data if span[1] <= length], self.begins)

    def ids(self, tokenizer: Any) -> list[int]:
        """Return the token ids. A name that is data is spelt by its characters; the texts between names are encoded by
        themselves. Raises ModelError for a text that the tokenizer cannot read, and OutOfMemory."""
        ends = [0, *(stop for _, stop in self.data)]
        starts = [*(start for start, _ in self.data), len(self.text)]
        first, *others = (self.text[start:stop] for start, stop in zip(ends, starts, strict=True))
        with encoding(self.text):
            try:
                ids = list(tokenizer(first, add_special_tokens=self.begins, verbose=False).input_ids)
                parts = tokenizer(others, add_special_tokens=False, verbose=False).input_ids if others else []
            except MemoryError:
                raise
            except Exception as error:  # tokenizers raises nothing more special
                raise ModelError(f"The model's tokenizer cannot read this text ({str(error)[:100]}).") from error
            for (start, stop), text, part in zip(self.data, others, parts, strict=True):
                ids += _spelt(tokenizer, self.text[start:stop]) + _following(tokenizer, text, part)
        return ids


@contextmanager
def encoding(text: str) -> Iterator[None]:
    """Within the block ``text`` is encoded. Raises OutOfMemory if there is not enough memory for that: the tokenizer
    itself would end the process. Other errors of the tokenizer that are no Exception become KvkeepError."""
    size = len(text) if text.isascii() else len(text.encode(errors="replace"))
    doing = f"encoding a text of {size:,} bytes"
    if not has_room(LEAST_BYTES + BYTES_PER_BYTE * size):
        raise out_of_memory(doing)
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit) as error:
        if isinstance(error, Exception) and ran_out_of_memory(error):
            raise out_of_memory(doing, error) from error
        raise
    except BaseException as error:  # a panic of the tokenizer's library, whose words may be those of the text
        if ran_out_of_memory(error):
            raise out_of_memory(doing, error) from error
        raise KvkeepError(f"The tokenizer failed on this text ({type(error).__name__}); change the text.") from error


def as_data(tokenizer: Any, text: str) -> PromptText:
    """Return a text in which every name of a special token is data."""
    pattern = special_names(tokenizer)
    return PromptText(text, [] if pattern is None else [hit.span() for hit in pattern.finditer(text)])


@lru_cache(maxsize=4)
def special_names(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of the names of a tokenizer's special tokens; None if it has none."""
    names = {one.content for one in tokenizer.added_tokens_decoder.values() if one.special and one.content}
    return re.compile(_any_of(names)) if names else None


def _any_of(names: Collection[str]) -> str:
    """Return a pattern of the longest of some names. Names with a common beginning are searched for at once, because a
    tokenizer may have thousands."""
    if len(names) == 1:
        return re.escape(next(iter(names)))
    rests = defaultdict[str, list[str]](list)
    for name in names:
        if name:
            rests[name[0]].append(name[1:])
    pattern = "|".join(re.escape(first) + _any_of(rest) for first, rest in rests.items())
    return f"(?:{pattern}){'?' if '' in names else ''}" if pattern else ""


@lru_cache(maxsize=256)
def _spelt(tokenizer: Any, name: str) -> list[int]:
    """Return the ids of a name's characters, or of its bytes."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return list(tokenizer(name, add_special_tokens=False, split_special_tokens=True).input_ids)
    state = b"" if backend.pre_tokenizer is None else backend.pre_tokenizer.__getstate__()
    if b'"ByteLevel"' in state:
        letters = {byte: letter for letter, byte in ALPHABET.items()}
        name = "".join(letters[byte] for byte in name.encode())
    return [one.id for letter in name for one in backend.model.tokenize(letter.replace(" ", SPACE))]


def _following(tokenizer: Any, text: str, ids: list[int]) -> list[int]:
    """Return the ids of a text that follows another one: without the space that some tokenizers put before a text."""
    spaces = len(text) - len(text.lstrip(" ")) + 1
    names = tokenizer.convert_ids_to_tokens(ids[:spaces])
    if not "".join(names).startswith(SPACE * spaces) or not hasattr(tokenizer, "backend_tokenizer"):
        return ids
    return [one.id for one in tokenizer.backend_tokenizer.model.tokenize(names[0][1:])] + ids[1:]


def begins_with(tokenizer: Any, text: PromptText, count: int) -> bool:
    """Return whether a text has more than ``count`` tokens, if its beginning tells this, which takes a fraction of
    encoding a much longer text. A cut changes only the tokens beside it."""
    lengths = (share * count for share in _CHARACTERS_PER_TOKEN)
    return any(
        len(text.beginning(length).ids(tokenizer)) > count + _BESIDE_A_CUT
        for length in lengths
        if length < len(text.text) // 2
    )
