"""Names of special tokens that are data, in one call for the whole text."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
from scripted import BEGIN, END, START, TURN, Vocabulary, byte_level, sentencepiece
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from kvkeep.decode.prompt import PromptText, as_data

PIECES = ("  ", "    ", " t", " th", " the", "de", "def", "<|", "|>", "</")
KINDS = ("byte level", "sentencepiece", "first", "no space", "stripping")
"""Tokenizers: ``first`` puts a space before a text, but not after a special token; ``stripping`` takes the white space
after one."""


def vocabulary_of(kind: str) -> Vocabulary:
    if kind in ("byte level", "stripping"):
        return byte_level(*PIECES)
    return sentencepiece(*PIECES, space_prefix=kind != "no space")


def made(kind: str) -> Any:
    """A tokenizer that adds BEGIN to texts."""
    own = vocabulary_of(kind).tokenizer()
    backend = own.backend_tokenizer
    if kind == "first":
        backend.normalizer = normalizers.Sequence([])
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if kind == "stripping":
        backend.add_special_tokens([AddedToken(START, special=True, normalized=False, rstrip=True)])
    begin = own.convert_tokens_to_ids(BEGIN)
    backend.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)])
    return own


class Counting:
    """A tokenizer that counts its calls."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        return self.inner(*given, **named)


def parts(dice: random.Random) -> list[str]:
    """Texts, and names of special tokens in them that are data: every second one."""
    words = ["the ", " def", "\n", "<|", "|>", "é", " ", "x", "  the", f"{START}user\n", TURN, f"{TURN} "]
    texts = ["".join(dice.choices(words, k=dice.randrange(6))) for _ in range(dice.randrange(1, 8))]
    return [one for text in texts for one in (text, dice.choice([TURN, START]))][:-1]


def text_of(given: list[str], data: bool = True) -> PromptText:
    text = PromptText("")
    for number, one in enumerate(given):
        text += PromptText(one, [(0, len(one))] if data and number % 2 else [])
    return text


@pytest.mark.parametrize(("kind", "begins"), [*product(KINDS, (True, False))])
def test_names_that_are_data_are_text_and_the_others_are_tokens(kind: str, begins: bool) -> None:
    own, vocabulary = made(kind), vocabulary_of(kind)
    special = [*map(vocabulary.id, (TURN, START))]
    for seed in range(60):
        given = parts(random.Random(seed))
        text = text_of(given)
        found = PromptText(text.text, text.data, begins).ids(own)
        between = "\0".join(given[::2])  # where no name is data
        assert [found.count(one) for one in special] == [between.count(name) for name in (TURN, START)]
        plain = own(text.text, add_special_tokens=begins).input_ids
        assert PromptText(text.text, [], begins).ids(own) == plain
        assert "".join(own.decode(found).split()) == "".join(own.decode(plain).split())


def test_no_space_is_put_after_a_name() -> None:
    for kind in KINDS:
        own = made(kind)
        text = as_data(own, f"the{TURN}river{START} was{START}{START}x")
        assert own.decode(PromptText(text.text, text.data, begins=False).ids(own)) == text.text


def test_a_tokenizer_is_called_twice_whatever_the_number_of_names() -> None:
    for kind in KINDS:
        counting = Counting(made(kind))
        text = as_data(counting, f"{TURN} the {START}" * 1000)
        assert len(text.data) == 2000 and not {3, 4} & {*text.ids(counting)} and counting.calls == 2
        assert counting.backend_tokenizer.encode_special_tokens is False


def test_merges_that_form_a_special_token_do_not_make_one_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = sentencepiece("</", "s>")
    merges = [*vocabulary.merges, ("</", "s>")]
    monkeypatch.setattr(Vocabulary, "merges", property(lambda self: merges))
    own = vocabulary.tokenizer()
    ids = as_data(own, f"a{END}b").ids(own)
    assert [vocabulary.tokens[one] for one in ids] == ["▁", "a", "<", "/", "s", ">", "b"]


def test_tokens_that_were_added_and_are_not_special_stay_tokens() -> None:
    for kind in KINDS:
        own = made(kind)
        own.add_tokens([AddedToken("<special>", special=True), AddedToken("<think>", special=False, normalized=False)])
        ids = as_data(own, f"{TURN}<think><special>").ids(own)
        assert own.convert_tokens_to_ids("<think>") in ids and own.convert_tokens_to_ids("<special>") not in ids


def test_threads_encode_at_once_as_each_would_alone() -> None:
    own = made("byte level")
    texts = [as_data(own, f"{TURN}the{number}" * 300) if number % 2 else PromptText(TURN * 300) for number in range(40)]
    alone = [one.ids(own) for one in texts]
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda one: one.ids(own), texts)] == alone
