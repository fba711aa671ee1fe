"""The pieces of text by the name of a pre-tokenizer: those of llama.cpp, on known cases."""

from __future__ import annotations

from time import process_time

import pytest
from tokenizers import Regex, pre_tokenizers

from kvkeep.errors import UnsupportedModelError
from kvkeep.models.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer, pre_tokenizer

TEXTS = (
    "It's 1234567 o'clock; WE'LL see.\r\n\n  def f(x):\n\treturn x**2  # комментарий \n",
    "你好，世界　2024年。こんにちは 안녕하세요 مرحبا ١٢٣٤ नमस्ते e\u0301 👩‍👩‍👧 ½²³ \u0085\u00a0\u2003x\u2028",
    "IMGIMGABZ<sentinel:12>    camelCaseHTTPServer's a/b//\n\n\x00\x1f\x7f▁ĠĊ",
    "",
)


def pieces(splits: PreTokenizer, text: str) -> list[str]:
    steps = [pre_tokenizers.Split(Regex(one), how) for one, how in splits.expressions]
    return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_the_pieces_are_the_text(name: str) -> None:
    for text in TEXTS:
        found = pieces(pre_tokenizer(name), text)
        assert "".join(found) == text
        assert all(found)


def test_a_letter_of_unicode_16_is_none() -> None:
    assert pieces(pre_tokenizer("gpt-2"), "a\U00010d4ab") == ["a", "\U00010d4a", "b"]
    assert pieces(pre_tokenizer("gpt-2"), "a\U00010cc0b") == ["a\U00010cc0b"]  # one of Unicode 8


@pytest.mark.turns(5)
@pytest.mark.parametrize("unit", ["a", " ", "1", "!", "aB"])
def test_the_time_grows_with_the_text_and_no_faster(unit: str) -> None:
    for splits in {one.splits: one for one in PRE_TOKENIZERS.values()}.values():
        start = process_time()
        pieces(splits, unit * 20_000 + "x")
        assert process_time() - start < 2  # 20,000 steps at each of 20,000 places would take minutes


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'qwen22'.*qwen2.*--pre NAME"):
        pre_tokenizer("qwen22")
    with pytest.raises(UnsupportedModelError, match="--pre NAME"):
        pre_tokenizer("?")
