r"""Pre-tokenizers: how text is split before the merges of byte pair encoding, by the names that GGUF files state.

The reference is llama.cpp (src/llama-vocab.cpp for the names and expressions, src/unicode.cpp for what they match).
The expressions are written for Oniguruma, which ``tokenizers`` uses, and differ from llama.cpp's where the engines do:

* ``\d`` and ``\b`` of C++ mean ASCII, so the digits are written out.
* llama.cpp's ``\p{Lu}``, ``\p{Ll}``, ``\p{Lt}``, ``\p{Lm}`` and ``\p{Lo}`` are any letter.
* Unicode white space never matches a literal range there (``ࠀ-一`` holds several), only ``\s``.
* ``$`` is the end of a piece, which is ``\z`` here.
* Its categories are those of Unicode 15.1: a letter that Unicode 16 added is none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from kvkeep.errors import UnsupportedModelError

_LATER = (
    r"\x{897}\x{1B4E}-\x{1B4F}\x{1B7F}\x{1C89}-\x{1C8A}\x{2427}-\x{2429}\x{31E4}-\x{31E5}\x{A7CB}-\x{A7CD}"
    r"\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}\x{10D40}-\x{10D8F}\x{10EC2}-\x{10EFC}\x{11380}-\x{113E2}\x{116D0}-\x{116E3}"
    r"\x{11BC0}-\x{11BF9}\x{11F5A}\x{13460}-\x{143FA}\x{16100}-\x{16139}\x{16D40}-\x{16D79}\x{18CFF}\x{1CC00}-\x{1CEB3}"
    r"\x{1E5D0}-\x{1E5FF}\x{1F8B2}-\x{1F8C1}\x{1FA89}-\x{1FA8F}\x{1FABE}\x{1FAC6}\x{1FADC}-\x{1FADF}\x{1FAE9}"
    r"\x{1FBCB}-\x{1FBEF}"
)
"""Code points that Unicode 15.1 does not assign and Unicode 16 does."""

_HAN = r"\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{2F800}-\x{2FA1F}"
"""The Chinese characters of the pre-tokenizer kimi-k2."""

_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}|{_OTHERS}|{_SPACES}"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_WORDS = rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_CHINESE_JAPANESE = "[一-龥぀-ゟ゠-ヿ]+"
_CASES = (
    r"[^\r\n\p{L}\p{N}]?(?:(?=LETTER)[^a-z])*(?:(?=LETTER)[^A-Z])+ENDING"
    r"|[^\r\n\p{L}\p{N}]?(?:(?=LETTER)[^a-z])+(?:(?=LETTER)[^A-Z])*ENDING"
)
"""Words that end where a capital follows a small letter; LETTER is a class, ENDING what a word may take along."""
_OTHERS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O = (
    _CASES.replace("LETTER", r"\p{L}").replace("ENDING", _CONTRACTION + "?")
    + rf"|\p{{N}}{{1,3}}|{_OTHERS_AND_SLASHES}|{_SPACES}"
)
_MARKED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_CONTRACTION}?"
_NOT_NEWLINES = r"[^\n]+|\n+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_NUMBERS_FROM_RIGHT = (
    r"[^\p{N}]+\p{N}*|\p{N}+",
    r"\A[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*\z)",
    r"\G\p{N}{3}",
)
"""Digits in threes from the right. The first digits stay with the text before them, as they do in llama.cpp."""


@dataclass(frozen=True)
class PreTokenizer:
    """What the name of a pre-tokenizer stands for."""

    splits: tuple[str | tuple[str, str], ...]
    """Expressions that split the text one after another: each splits the pieces that those before it left, into what it
    matches and what is between; or otherwise, where a behaviour of ``tokenizers``' Split stands beside it."""
    ignore_merges: bool = False
    """Whether a piece that is a token is that token, whatever the merges say."""
    add_bos: bool = False
    """Whether a text begins with the token of the beginning if the file does not say."""
    always_bos: bool = False
    """Whether it does even if the file says no."""
    default_bos: int | None = 11
    """The id of the beginning if the file states none."""
    bytes_as_letters: bool = True
    """Whether tokens spell bytes as letters (GPT-2's). Otherwise they are text with ``▁`` for a space, and bytes
    without a token are spelled as ``<0x0A>``."""

    @property
    def expressions(self) -> tuple[tuple[str, str], ...]:
        """The splits, with the categories of Unicode 15.1, and the behaviour of each."""
        pairs = ((one, "isolated") if isinstance(one, str) else one for one in self.splits)
        return tuple((_CATEGORY.sub(lambda found: f"[{found[0]}&&[^{_LATER}]]", one), how) for one, how in pairs)


_CATEGORY = re.compile(r"\\p\{[LMNPS]\}")

_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z\x{B5}À-ÖØ-öø-ƺƼ-ƿ\x{1C4}-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\x{3F5}Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    r"Ὀ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼ\x{2102}\x{2107}\x{210A}-\x{2113}"
    r"\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}"
    r"\x{2145}-\x{2149}ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}"
    r"-\x{FF5A}𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_CHINESE = r"[一-龥ࠀ-一가-퟿&&\S]+"

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum",
         "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "mpt", "olmo", "jais", "exaone4", "trillion",
         "granite-docling"),
        PreTokenizer((_GPT2,)),
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "megrez", "hunyuan", "grok-2", "solar-open"),
        PreTokenizer((_QWEN2,)),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    "chatglm-bpe": PreTokenizer((_LLAMA3,), default_bos=None),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignore_merges=True, default_bos=None)),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
        PreTokenizer((r"\p{N}{1,3}", _CHINESE_JAPANESE, _DEEPSEEK3)),
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), PreTokenizer((_GPT4O,))),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        PreTokenizer((
            rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORDS}|\p{{N}}|{_OTHERS}|\s*[\r\n]|\s+(?!\S)|\s+",
        )),
    ),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        PreTokenizer((*_NUMBERS_FROM_RIGHT, rf"{_MARKED_WORDS}|\p{{N}}{{1,3}}|{_OTHERS_AND_SLASHES}|{_SPACES}")),
    ),
    **dict.fromkeys(
        ("gemma4", "granite-embed-multi-311m"),
        PreTokenizer((_NOT_NEWLINES,), add_bos=True, always_bos=True, bytes_as_letters=False),
    ),
    "sarvam-moe": PreTokenizer((_NOT_NEWLINES,), bytes_as_letters=False),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORDS}|\p{{N}}+|{_OTHERS}|{_SPACES}"), ignore_merges=True
    ),
    "jais-2": PreTokenizer((
        rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}|\s*[\r\n]+|"
        + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s",
    )),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟、-。]+", r"\s+\z", _DEEPSEEK_CHINESE, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CHINESE, r"\p{N}")),
    "spark2_5": PreTokenizer((
        r"\p{N}{1,3}", _CHINESE_JAPANESE, rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}",
    )),
    "youtu": PreTokenizer(
        ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
         rf"{_MARKED_WORDS}|\p{{N}}|{_OTHERS_AND_SLASHES}|{_SPACES}"),
        ignore_merges=True,
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "qwen35": PreTokenizer((
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    )),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "tekken": PreTokenizer(
        (_CASES.replace("LETTER", r"\p{L}").replace("ENDING", "") + rf"|\p{{N}}|{_OTHERS_AND_SLASHES}|{_SPACES}",),
        ignore_merges=True,
        add_bos=True,
    ),
    "chameleon": PreTokenizer(
        ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        add_bos=True,
    ),
    "granite-embed-multi-97m": PreTokenizer(
        (_CASES.replace("LETTER", r"[\p{L}\p{M}]").replace("ENDING", _CONTRACTION + "?")
         + rf"|\p{{N}}{{1,3}}|{_OTHERS_AND_SLASHES}|{_SPACES}",),
        ignore_merges=True,
    ),
    "kimi-k2": PreTokenizer((
        rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?|\p{{N}}{{1,3}}|{_OTHERS}|{_SPACES}",
    )),
    "superbpe": PreTokenizer((r"\p{N}+", (r"(?:[0-9]{3})+(?![0-9])", "merged_with_next"), r"[0-9]{3}(?=[0-9]{3})")),
    "seed-coder": PreTokenizer((rf"{_CONTRACTION}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "ufakzeka": PreTokenizer((rf"{_WORDS}|\p{{N}}|{_OTHERS}|{_SPACES}",)),
    "afmoe": PreTokenizer((
        *_NUMBERS_FROM_RIGHT,
        "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        _DEEPSEEK3,
    )),
    "laguna": PreTokenizer((_NOT_NEWLINES, _QWEN2)),
    "exaone-moe": PreTokenizer((
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    )),
}  # fmt: skip
"""Pre-tokenizers by name."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer of llama.cpp's ``name``; a file that states none has the name ``default``.
    Raises UnsupportedModelError for an unknown name."""
    if name not in PRE_TOKENIZERS:
        near = get_close_matches(name, PRE_TOKENIZERS, n=3, cutoff=0.5) or sorted(PRE_TOKENIZERS)[:3]
        raise UnsupportedModelError(
            f"The file splits text by the pre-tokenizer {name[:80]!r}, which kvkeep does not know (the nearest are "
            f"{', '.join(near)}); give one that splits in the same way with --pre NAME, or update kvkeep."
        )
    return PRE_TOKENIZERS[name]
