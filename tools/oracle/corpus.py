"""The corpus: texts on which tokenizers differ. It is the same whenever it is made."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

WRITTEN: dict[str, list[str]] = json.loads((Path(__file__).parent / "texts.json").read_text("utf-8"))
"""Texts that are written by hand, by kind; prose is of the public domain."""
SPACES = ["  ", "   ", "\r\n", *" \t\n\r\v\f", "\u00a0", "\u1680", "\u2003", "\u2009", "\u200b", "\u2028",
          "\u2029", "\u202f", "\u205f", "\u3000", "\ufeff", "\u0085"]  # fmt: skip
CONTROLS = [
    chr(code) for code in (*range(1, 9), 14, 27, 31, 127, 128, 159, 173, 0x200D, 0x200E, 0x2060, 0xFFF9, 0xFFFD)
]
RARE = [
    *"½²³¼①Ⅷ㊿٣४๕〇〸𝟘ªºʰˈːǅǈﬁßıſK",
    *"\u0301\u0308\u064b\u093e\u0e31\u20e3\ufe0f\u302a",
    *"_-–—…“”‘’«»¿¡§¶€£¥№™©°±×÷∑√∞≠",
]


def texts() -> list[str]:
    """All texts, each once, shortest kinds first."""
    written = [texts for kind, texts in WRITTEN.items() if kind != "names"]
    kinds = (_white_space(), _controls(), _names(), *written, _long(), _mixed())
    return list(dict.fromkeys(text for kind in kinds for text in kind))


def _white_space() -> Iterator[str]:
    yield ""
    for space in SPACES:
        yield space
        yield f"a{space}b{space}"
        yield f"{space}x 1{space}{space}y."
    for before, after in (
        ("  ", ""),
        ("", "   "),
        ("\n\n", "\n"),
        ("\t\t", " \t"),
        (" \n ", "\n \n"),
        ("\r\n\r\n", "\r\n"),
    ):
        yield f"{before}word{after}"
        yield f"one{before}two{after}three"
        yield f"{before}{after}"
    for length in (4, 7, 8, 15, 16, 31, 33):
        yield " " * length
        yield f"if x:\n{' ' * length}return\n"
    yield from ("\n" * length + "end" for length in (1, 2, 3, 4, 7))
    yield from ("\t" * length + "end" for length in (1, 2, 3, 4, 9))


def _controls() -> Iterator[str]:
    for control in CONTROLS:
        yield f"a{control}b {control}{control} 1{control}2"
    yield "\x00"
    yield "nul\x00in text"


def _names() -> Iterator[str]:
    for name in WRITTEN["names"]:
        yield name
        yield f"Say {name} twice: {name}{name} ."
    for name in WRITTEN["names"][:12]:
        yield name[:-1]
        yield f"x{name[1:]}"
        yield f" {name}\n {name} \n{name.upper()}"
    yield "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    yield "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    yield "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    yield "<s>[INST] Hi [/INST] Hello</s>[INST] Again [/INST]"
    yield "<|user|>\nHi<|end|>\n<|assistant|>\n"


def _long() -> Iterator[str]:
    yield "a" * 300
    yield "ab" * 150
    yield "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft"
    yield "pneumonoultramicroscopicsilicovolcanoconiosis " * 3
    yield "1234567890" * 25
    yield "あ" * 60
    yield "\u0301" * 40
    yield "=" * 100 + "\n" + "-" * 77 + "\n" + "#" * 33
    yield "!?" * 40
    yield "https://example.org/a/very/long/path?with=parameters&and=more#fragment-" + "x1y2" * 20
    yield "x" + " " * 200 + "y"
    yield "🙂" * 30


def _mixed() -> Iterator[str]:
    """Random runs of characters of few kinds each, which meet boundaries that nobody writes."""
    drawn = random.Random(48)
    words = [*"'\"().,/\\", "the", " The", "ing", "HTTP", "iPhone", " I", "'s", "’S", "don't", "{}", "->"]
    pools = [words, SPACES, list("0123456789"), RARE, list("éüñÇØабвΓΩαעبहไ日한カぬ"), CONTROLS[:6]]
    for _ in range(200):
        parts = drawn.choices(pools, weights=(6, 4, 3, 2, 3, 1), k=drawn.randint(3, 14))
        yield "".join("".join(drawn.choices(pool, k=drawn.randint(1, 4))) for pool in parts)
