"""Text as its tokens arrive: that of the whole, in the place where it stands."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from conftest import tokenizer
from scripted import BEGIN, END, START, TURN, Vocabulary, byte_level, sentencepiece
from tokenizers import AddedToken

from kvkeep.engine.pieces import BytePieces, WindowPieces, pieces_of, token_texts
from kvkeep.engine.token_spelling import spelt, token_spelling

TEXTS = (
    "def f(n):\n    if n:\n        return 1\n\n\n  # é, 日本語, 🦜 and 👩‍👩‍👧\t.",
    " leading,  double   spaces \n \n  and trailing  ",
    "\n\n   ",
    "one",
)
HALF = "\N{REPLACEMENT CHARACTER}"
PIECES = ("  ", "    ", "        ", " t", " th", " the", "de", "def", "\n\n")
KINDS = {
    "byte level": byte_level(*PIECES),
    "sentencepiece": sentencepiece(*PIECES[:8]),
    "sentencepiece without a space of its own": sentencepiece(*PIECES[:8], space_prefix=False),
}


class Counting:
    """A tokenizer that counts its calls of decode."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decode(self, ids: Any, **options: Any) -> Any:
        self.calls += 1
        assert len(ids) < 30, "the text is decoded again"
        return self.inner.decode(ids, **options)


def streamed(own: Any, ids: list[int], before: list[int] = []) -> str:  # noqa: B006
    pieces = pieces_of(own, before)
    return "".join(pieces.add([one]) for one in ids) + pieces.rest()


@pytest.mark.parametrize(("name", "text"), [*product(KINDS, TEXTS)])
def test_a_prompt_and_its_answer_are_the_text_of_both_wherever_it_is_cut(name: str, text: str) -> None:
    own = KINDS[name].tokenizer()
    ids = own(text, add_special_tokens=False).input_ids
    assert own.decode(ids) == text
    for cut in range(len(ids) + 1):
        known, decoded = streamed(own, ids[:cut]).rstrip(HALF), own.decode(ids[:cut])
        assert HALF in decoded or known == decoded
        assert known + streamed(own, ids[cut:], ids[:cut]) == text
        pieces = pieces_of(own, ids[:cut])
        assert known + pieces.add(ids[cut:]) + pieces.rest() == text


@pytest.mark.parametrize("name", KINDS)
def test_bytes_of_tokens_are_those_of_the_text(name: str) -> None:
    vocabulary = KINDS[name]
    own, dice = vocabulary.tokenizer(), random.Random(1)
    for before, count in product(([], [vocabulary.id(START)], [vocabulary.id("a")]), (1, 5, 40)):
        ids = [dice.randrange(len(vocabulary.tokens)) for _ in range(count)]
        pieces = pieces_of(own, before)
        data, text = b"", ""
        for one in ids:
            assert pieces.data(one, named=True) in (pieces.data(one), vocabulary.tokens[one].encode())
            data += pieces.data(one)
            text += pieces.add([one])
            assert data.decode("utf-8", "replace").startswith(text) and 0 <= pieces.withheld < 4
        assert data.decode("utf-8", "replace") == text + pieces.rest()
        assert vocabulary.sentencepiece or data.decode("utf-8", "replace") == own.decode(ids, skip_special_tokens=True)


def test_an_answer_has_not_the_space_that_encoding_puts_before_it() -> None:
    vocabulary = KINDS["sentencepiece"]
    own, space = vocabulary.tokenizer(), vocabulary.id(" the")
    assert own(f"{START}the").input_ids == [vocabulary.id(START), space]
    begin, start, word = map(vocabulary.id, (BEGIN, START, "x"))
    for before, text in (([], "the"), ([begin], "the"), ([begin, word, start], "the"), ([begin, start, word], " the")):
        assert streamed(own, [space, space], before) == f"{text} the"
    first = pieces_of(own, [word, start])
    assert (first.data(space), first.data(vocabulary.id(TURN)), first.data(vocabulary.id(TURN), named=True)) == (
        b"the", b"", TURN.encode(),
    )  # fmt: skip
    other = KINDS["sentencepiece without a space of its own"]
    assert streamed(other.tokenizer(), [other.id(" the")], [other.id(START)]) == " the"


def test_half_a_character_is_withheld_and_shown_at_the_end() -> None:
    for vocabulary in KINDS.values():
        own, (first, second) = vocabulary.tokenizer(), map(vocabulary.id, (b"\xc3", b"\xa9"))
        pieces = pieces_of(own)
        assert (pieces.add([first]), pieces.withheld, pieces.add([second]), pieces.withheld) == ("", 1, "é", 0)
        assert pieces.add([first, vocabulary.id("a"), first]) == "\ufffda" and pieces.rest() == "\ufffd"
        assert streamed(own, [second], [first]) == "é" and streamed(own, [first, vocabulary.id(END), second]) == "é"


def test_no_token_is_decoded_again() -> None:
    texts: list[tuple[Any, type]] = [(one.tokenizer(), BytePieces) for one in KINDS.values()]
    for own, kind in [*texts, (tokenizer(), WindowPieces)]:
        counting = Counting(own)
        pieces = pieces_of(counting, [5] * 1000)
        assert isinstance(pieces, kind)
        for number in (1000, 2000):
            for _ in range(number):
                pieces.add([7])
        assert counting.calls == (0 if kind is BytePieces else 2 * 3000)


def test_tokenizers_of_other_kinds_decode_in_a_window() -> None:
    own = tokenizer()
    ids = own("the of and it was for on").input_ids
    assert token_spelling(own) is None
    for cut in range(len(ids)):
        assert own.decode(ids[:cut]) + streamed(own, ids[cut:], ids[:cut]) == own.decode(ids)
    special = [2] * 20  # <unk>, which has no text and no context
    assert streamed(own, [*special, *ids, *special, *ids], special) == " ".join([own.decode(ids)] * 2)
    assert streamed(own, ids, [*ids, *special]) == " " + own.decode(ids)
    pieces = pieces_of(own, ids[:2])
    assert (pieces.data(ids[2]), pieces.data(2), pieces.data(2, named=True)) == (b" and", b"", b" <unk>")


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_a_window_and_bytes_agree(kind: Callable[..., Vocabulary], monkeypatch: pytest.MonkeyPatch) -> None:
    own = kind(*PIECES[:8]).tokenizer()
    for text in TEXTS[kind is sentencepiece :]:  # a decoder of byte tokens gives up on all in a row if one is missing
        ids = own(text).input_ids
        wanted = [streamed(own, ids[cut:], ids[:cut]) for cut in range(1, len(ids))]
        with monkeypatch.context() as patch:
            patch.setattr("kvkeep.engine.pieces.token_spelling", lambda _: None)
            assert [streamed(own, ids[cut:], ids[:cut]) for cut in range(1, len(ids))] == wanted


@pytest.mark.parametrize("name", KINDS)
def test_texts_of_tokens_join_to_the_whole(name: str) -> None:
    vocabulary = KINDS[name]
    own = vocabulary.tokenizer()
    ids = own(f"{START}{TEXTS[0]}{TURN} x{END}").input_ids
    texts = token_texts(own, ids)
    assert "".join(texts) == own.decode(ids) and len(texts) == len(ids) and texts[-1] == END
    assert token_texts(own, []) == []


def test_tokens_that_were_added_are_their_text() -> None:
    for vocabulary in KINDS.values():
        own = vocabulary.tokenizer()
        own.add_tokens([AddedToken("<think é>", normalized=False)])
        ids = own("a <think é> b").input_ids
        assert streamed(own, ids) == own.decode(ids) and " <think é> " in own.decode(ids)
        assert streamed(own, [len(own) + 100]) == "", "a row of the embedding without a token"


def test_parts_of_characters_are_spelt_by_their_bytes() -> None:
    assert [spelt(one) for one in (b"", " é".encode(), b"\xc3", b"a\xe2\x82")] == ["", " é", "\\xc3", "a\\xe2\\x82"]
