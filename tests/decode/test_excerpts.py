"""Excerpts: what is read of a long text, by the words of a question."""

from __future__ import annotations

import re
from math import log
from typing import Any
from unicodedata import normalize

import pytest
from conftest import tokenizer

from kvkeep.decode.excerpts import BM25, K1, B, Excerpts, chunks, excerpt
from kvkeep.errors import UsageError


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize("size", [1, 4, 7, 100])
def test_chunks_are_the_text_and_end_with_sentences(size: int) -> None:
    text = [ord(letter) for letter in "One is. Two is not. Three is? No end follows here at all"]
    found = list(chunks(Letters(), text, size))
    assert [token for start, stop in found for token in text[start:stop]] == text
    assert all(0 < stop - start <= size for start, stop in found)
    if size == 7:
        assert Letters().decode(text[: found[0][1]]) == "One is."


def test_excerpts_have_the_words_of_the_question_in_the_order_of_the_text() -> None:
    text = [ord(letter) for letter in "A fox.A hen.A dog.A cow.A pig.A fox."]
    index = Excerpts(Letters(), text, 6)
    for question, limit, found in (("dog", 36, "A dog."), ("fox, dog", 12, "A dog.A fox."), ("no", 36, "")):
        spans = index.spans(index.scores(question), limit)
        assert "".join(Letters().decode(text[start:stop]) for start, stop in spans) == found  # of equals the newest
    assert index.spans(index.scores("fox"), 3) == []


def test_a_text_within_the_limit_is_read_as_a_whole() -> None:
    words, found = "the of and to in is was it for on", tokenizer()
    assert excerpt(found, words, "is it", 10) == (words, 10, 10)
    short = excerpt(found, f"{words} " * 60, "is it", 256)
    assert short.tokens <= 256 < short.total == 600 and len(short.text.split()) == short.tokens


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("\u8fd9\u662f\u4e00\u6bb5\u6587\u5b57\u3002" * 90, "\u79d8\u5bc6\u4ee3\u7801\u662f\u4ec0\u4e48"),
        ("\u092f\u0939 \u092a\u093e\u0920 \u0939\u0948\u0964 " * 90, "\u0917\u0941\u092a\u094d\u0924"),
        ("Es war kalt. " * 200, "Munchen".replace("u", "u\u0308")),
        ("\U0001f600 yes. " * 200, "where is the fox"),
    ],
)  # fmt: skip
def test_words_of_any_script_are_found_and_no_character_is_cut(text: str, question: str) -> None:
    found = byte_tokenizer()
    place = len(text) // 3
    whole = f"{text[:place]}. {normalize('NFC', question)} 7421. {text[place:]}"
    short = excerpt(found, whole, question, 256)
    assert normalize("NFC", question) in short.text and "\ufffd" not in short.text
    assert short.tokens <= 280 and short.total > 900


def test_passages_are_as_in_the_text_and_apart() -> None:
    """Also with a tokenizer that leaves the space before a word out of its place, as those of GPT-2's kind do."""
    found = byte_tokenizer(trim=True)
    text = "".join(f"Line {number} is of the {'fox' if number % 7 == 1 else 'hen'}.\n\n" for number in range(90))
    passages = excerpt(found, text, "fox", 600).text.split("\n\n")
    assert len(passages) > 5 and all(passage in text for passage in passages)
    assert all(re.fullmatch("(Line [0-9]+ is of the (fox|hen)\\.)?", line) for line in passages[1:-1])


def test_a_question_without_a_word_of_the_text_is_refused() -> None:
    for question in ("zebra", "???"):
        with pytest.raises(UsageError, match="none of the words of the question"):
            excerpt(tokenizer(), "the of and to " * 100, question, 128)


def byte_tokenizer(trim: bool = False) -> Any:
    """A tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(letters, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=trim)
    return PreTrainedTokenizerFast(tokenizer_object=inner)


# -- BM25, beside its formula written out ------------------------------------------------------------------


TEXTS = ["The cat sat.", "The dog sat on the cat, the cat!", "A bird sang.", "the the the the"]


def by_the_formula(texts: list[str], question: set[str], place: int) -> float:
    split = [text.lower().replace(".", "").replace(",", "").replace("!", "").split() for text in texts]
    mean = sum(len(words) for words in split) / len(split)
    total = 0.0
    for word in question:
        holders = sum(word in words for words in split)
        count = split[place].count(word)
        weight = log(1 + (len(split) - holders + 0.5) / (holders + 0.5))
        total += weight * count * (K1 + 1) / (count + K1 * (1 - B + B * len(split[place]) / mean))
    return total


@pytest.mark.parametrize("question", ["the cat", "Cat cat CAT?", "bird sat fish", "fish"])
def test_the_scores_are_those_of_the_formula(question: str) -> None:
    words = set(question.lower().strip("?").split())
    expected = [by_the_formula(TEXTS, words, place) for place in range(len(TEXTS))]
    assert BM25(TEXTS).scores(question) == pytest.approx(expected)


def test_a_rare_word_counts_more_than_a_frequent_one() -> None:
    scores = BM25(TEXTS).scores("the bird")
    assert max(range(len(TEXTS)), key=scores.__getitem__) == 2


def test_texts_without_words_score_zero() -> None:
    assert BM25(["", "..."]).scores("cat") == [0, 0]
