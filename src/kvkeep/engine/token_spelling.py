"""The bytes of each token of a vocabulary.

Two kinds of vocabularies spell bytes: byte-level ones (GPT-2) write each byte as a character of an alphabet, and
sentencepiece's write a space as ``▁`` and bytes without a character of their own as tokens (``<0x0A>``). In both, the
text of tokens is the text of their joined bytes, so a text can be decoded token by token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""The byte of each character of a byte-level vocabulary (Radford et al., 2019)."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""sentencepiece's character for a space."""
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenSpelling:
    """The bytes of a tokenizer's tokens by their ids."""

    name: Callable[[int], str | None]
    """Returns the token with an id as the vocabulary spells it; None: there is none."""
    spelling: Callable[[str], bytes]
    """Returns the bytes of a token as the vocabulary spells it."""
    added: Mapping[int, str]
    """The texts of tokens that were added to the vocabulary, special ones included."""
    special: frozenset[int]
    """Ids of special tokens, which are no part of a text."""
    prefix: bool
    """Whether encoding puts a space before a text, which decoding takes away."""
    prefix_after_special: bool
    """Whether encoding puts that space after each special token, too."""
    _known: dict[int, bytes] = field(default_factory=dict, repr=False)

    def __getitem__(self, token: int) -> bytes:
        """Return the bytes of a token, and the name of a special one. An id that the vocabulary lacks has none."""
        found = self._known.get(token)
        if found is None:
            text = self.added.get(token)
            name = self.name(token) if text is None else text
            raw = text is not None and self.spelling is _byte_level
            found = b"" if name is None else name.encode() if raw else self.spelling(name)
            self._known[token] = found
        return found

    def begins(self, before: Sequence[int]) -> bool:
        """Return whether the space that begins the text after these tokens is the one that encoding puts there.

        It is, at the beginning of a text. It also is after a special token, if the tokenizer puts a space there when it
        encodes (as llama.cpp does with ``add_space_prefix``). So an answer after ``[/INST]`` is "Hello", one after
        "The capital is" is " Paris", and the tokenizer gives the answer's tokens again for the prompt's text with it.
        """
        if not self.prefix:
            return False
        if before and before[-1] in self.special and self.prefix_after_special:
            return True
        return all(token in self.special for token in reversed(before))


@lru_cache(maxsize=4)
def token_spelling(tokenizer: Any) -> TokenSpelling | None:
    """Return the bytes of a tokenizer's tokens; None if its decoder is of neither kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    if tokenizer.clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE":
        return None  # transformers removes spaces before punctuation
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    spelling = _spelling(steps)
    if spelling is None:
        return None
    tokens = backend.get_added_tokens_decoder()
    prefix = any(one["type"] == "Strip" for one in steps)
    return TokenSpelling(
        name=backend.id_to_token,
        spelling=spelling,
        added={one: token.content for one, token in tokens.items()},
        special=special_ids(tokenizer),
        prefix=prefix,
        prefix_after_special=prefix and _prefixes_after_special(backend),
    )


@lru_cache(maxsize=4)
def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens."""
    return frozenset(one for one, token in tokenizer.added_tokens_decoder.items() if token.special)


def _spelling(steps: Sequence[Mapping[str, Any]]) -> Callable[[str], bytes] | None:
    """Return the spelling of a decoder's vocabulary; None if it is of neither kind."""
    kinds = [one["type"] for one in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    wanted: dict[str, dict[str, Any]] = {
        "Replace": {"pattern": {"String": SPACE}, "content": " "},
        "ByteFallback": {},
        "Fuse": {},
        "Strip": {"content": " ", "start": 1, "stop": 0},
    }
    known = all(one["type"] in wanted and wanted[one["type"]].items() <= one.items() for one in steps)
    return _sentencepiece if known and {"Replace", "ByteFallback", "Fuse"} <= {*kinds} else None


def _byte_level(name: str) -> bytes:
    try:
        return bytes(ALPHABET[one] for one in name)
    except KeyError:  # a token that was not made of bytes
        return name.encode()


def _sentencepiece(name: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(name)
    return bytes.fromhex(byte[1]) if byte else name.replace(SPACE, " ").encode()


def _prefixes_after_special(backend: Any) -> bool:
    """Return whether encoding puts a space between a special token and the text after it."""
    for token in backend.get_added_tokens_decoder().values():
        if token.special and not (token.rstrip or token.single_word):
            made = backend.encode(f"{token.content}a", add_special_tokens=False).tokens
            return len(made) > 1 and made[0] == token.content and made[1].startswith(SPACE)
    return False


def spelt(data: bytes) -> str:
    """Return the text of a token's bytes. Bytes that are no whole characters are written as OpenAI does: ``\\xc3``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("utf-8", "backslashreplace")
