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
CASES = {
    "gpt-2": ("don't  stop 123!?\n\n x ", ["don", "'t", " ", " stop", " 123", "!?", "\n\n", " x", " "]),
    "smollm": ("4.\n\n1. First 12", ["4", ".", "\n\n", "1", ".", " First", " ", "1", "2"]),
    "default": ("a 1234<b", ["a", " ", "123", "4", "<", "b"]),
    "llama-bpe": ("12345 WE'LL\n\n  x!\n", ["123", "45", " WE", "'LL", "\n\n", " ", " x", "!\n"]),
    "qwen2": ("12 (é\u0301)", ["1", "2", " (", "é", "\u0301)"]),
    "qwen35": ("12 (é\u0301)", ["1", "2", " (", "é\u0301", ")"]),
    "falcon": ("a`b 12345", ["a", "`", "b", " ", "123", "45"]),
    "gpt-4o": ("camelCase's 1234 ABc", ["camel", "Case's", " ", "123", "4", " ABc"]),
    "tekken": ("camelCase's 12", ["camel", "Case", "'s", " ", "1", "2"]),
    "deepseek-llm": ("ab　中 ,\u3000\n", ["ab", "　", "中", " ,", "\u3000", "\n"]),
    "deepseek-coder": ("a1.b 中", ["a", "1", ".", "b", " ", "中"]),
    "deepseek-v3": ("1234中かx,a", ["123", "4", "中か", "x", ",a"]),
    "chameleon": ("IMGIMGABZx    12", ["IMGIMGABZ", "x", "    ", "1", "2"]),
    "poro-chat": ("ab, c", ["ab", ",", " c"]),
    "afmoe": ("  1234567 \n  123456", [" ", " ", "1", "234", "567", " \n", " ", " ", "123", "456"]),
    "tiny_aya": ("12345", ["12", "345"]),
    "superbpe": ("x 1234567 ١٢1234١", ["x ", "1", "234", "567", " ", "١٢1", "234١"]),
    "kimi-k2": ("中文abc's 1234", ["中文", "abc's", " ", "123", "4"]),
    "bailingmoe": ("a\n!\nb 12", ["a", "\n", "!\n", "b", " ", "1", "2"]),
    "exaone-moe": ("ab cd\n\n", ["ab cd", "\n\n"]),
    "seed-coder": ("!!\n x", ["!!", "\n", " x"]),
    "ufakzeka": ("Ali'nin", ["Ali", "'nin"]),
    "jais-2": (" " * 13 + "x", [" " * 8, " " * 4, " x"]),
    "youtu": ("한국，中文A's", ["한국", "，", "中文", "A's"]),
    "laguna": ("a !\n\nb", ["a", " !", "\n\n", "b"]),
    "gemma4": ("a b\n\nc", ["a b", "\n\n", "c"]),
}


def pieces(splits: PreTokenizer, text: str) -> list[str]:
    steps = [pre_tokenizers.Split(Regex(one), how) for one, how in splits.expressions]
    return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", CASES)
def test_text_is_split_as_the_name_says(name: str) -> None:
    text, expected = CASES[name]
    assert pieces(PRE_TOKENIZERS[name], text) == expected


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_the_pieces_are_the_text(name: str) -> None:
    for text in TEXTS:
        found = pieces(pre_tokenizer(name), text)
        assert "".join(found) == text
        assert all(found)


def test_a_letter_of_unicode_16_is_none() -> None:
    assert pieces(pre_tokenizer("gpt-2"), "a\U00010d4ab") == ["a", "\U00010d4a", "b"]
    assert pieces(pre_tokenizer("gpt-2"), "a\U00010cc0b") == ["a\U00010cc0b"]  # one of Unicode 8


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
