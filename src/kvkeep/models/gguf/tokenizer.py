"""The tokenizer of a GGUF file: what ``tokenizers`` builds of its vocabulary, with llama.cpp's token ids.

``tokenizer(text)`` gives the ids of ``llama_tokenize`` with special tokens added and parsed, and
``split_special_tokens=True`` those without parsing them. The text of tokens is what llama.cpp writes while it
generates: the spaces before punctuation that its ``llama_detokenize`` takes out for some pre-tokenizers
(``clean_spaces``) stay.

Three rules of llama.cpp are not kept to the letter. Of special tokens that overlap in a text
(``>>TITLE<<|endoftext|>``) the leftmost is taken, and llama.cpp takes the longest. After a special token of Phi-3 all
white space is dropped, and llama.cpp drops that of ASCII. Of two different tokens with the same score that overlap,
which no sentencepiece model has, llama.cpp makes the leftmost first.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvkeep.errors import UnsupportedModelError, out_of_memory
from kvkeep.models.gguf.keys import FileKeys
from kvkeep.models.gguf.merges import listed_merges, merges_by_score
from kvkeep.models.gguf.pre_tokenizers import PreTokenizer
from kvkeep.models.gguf.templates import templates_of
from kvkeep.models.gguf.vocabulary import TokenType, Vocabulary, vocabulary_of
from kvkeep.models.tokenizer_files import check_names
from kvkeep.native.room import has_room

PreTokenizerStep = pre_tokenizers.PreTokenizer

_SPACE = "▁"
_TOKEN_BYTES, _LEAST_BYTES = 1600, 32 << 20
"""Memory that building a tokenizer takes at most: for each token (measured: 1,200 with 262,144 tokens), and beyond."""
_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)
"""Types of tokens whose names are text where special tokens are not parsed."""


def tokenizer_of(keys: FileKeys, pre: str | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a file; ``pre``: the name of a pre-tokenizer to use instead of the file's.

    Raises ModelError for a file whose vocabulary, merges or templates contradict themselves, UnsupportedModelError for
    a kind of tokenizer, or a pre-tokenizer, that kvkeep does not know, UsageError for such a ``pre``.
    """
    return build_tokenizer(keys, vocabulary_of(keys, pre))


def build_tokenizer(keys: FileKeys, vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a file whose vocabulary was read."""
    count = len(vocabulary.ids)
    if not has_room(_LEAST_BYTES + _TOKEN_BYTES * count):  # the library itself would end the process
        raise out_of_memory(f"a tokenizer of {count:,} tokens")
    splits = vocabulary.kind.pre
    built = _with_merges(keys, vocabulary, splits) if splits else _with_scores(keys, vocabulary)
    added = list(_added(keys, vocabulary))
    check_names((one.content for one in added), keys.file)
    built.add_tokens(added)
    built.post_processor = _template(vocabulary)
    return _wrapped(built, vocabulary, templates_of(keys))


def _with_merges(keys: FileKeys, vocabulary: Vocabulary, splits: PreTokenizer) -> Tokenizer:
    """Return a tokenizer that splits text and merges the pieces as the file lists."""
    built = Tokenizer(
        BPE(
            dict(vocabulary.ids),
            listed_merges(keys, vocabulary.ids),
            ignore_merges=splits.ignore_merges,
            byte_fallback=not splits.bytes_as_letters,
        )
    )
    steps: list[PreTokenizerStep] = [pre_tokenizers.Split(Regex(one), how) for one, how in splits.expressions]
    if splits.bytes_as_letters:
        steps += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), *_dropped(vocabulary)]
        built.decoder = decoders.Sequence([*_verbatim(vocabulary), decoders.ByteLevel()])
    else:
        built.decoder = decoders.Sequence([*_spaces(splits.escaped_spaces), decoders.ByteFallback(), decoders.Fuse()])
    if splits.escaped_spaces:
        built.normalizer = normalizers.Replace(" ", _SPACE)
    built.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return built


def _dropped(vocabulary: Vocabulary) -> list[PreTokenizerStep]:
    """Return what takes out the letters of bytes that have no token, and keeps what is beside them apart."""
    missing = set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.ids.keys()
    if not missing:
        return []
    letters = "".join(rf"\x{{{ord(one):X}}}" for one in sorted(missing))
    return [pre_tokenizers.Split(Regex(f"[{letters}]"), "removed")]


def _verbatim(vocabulary: Vocabulary) -> Iterator[decoders.Decoder]:
    """Yield what keeps the text of special tokens that spell bytes otherwise: ``ø`` is not the byte 0xF8."""
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for one in vocabulary.of(*_SPECIAL, TokenType.USER_DEFINED):
        text = vocabulary.tokens[one]
        if not text.isascii() and letters.issuperset(text):
            exactly = "".join(rf"\x{{{ord(letter):X}}}" for letter in text)
            spelled = "".join(piece for piece, _ in step.pre_tokenize_str(text))
            yield decoders.Replace(Regex(rf"\A{exactly}\z"), spelled)


def _with_scores(keys: FileKeys, vocabulary: Vocabulary) -> Tokenizer:
    """Return a tokenizer that merges text by the scores of tokens (sentencepiece). With a prefix, what begins a text or
    follows a special token begins with a space."""
    unk = vocabulary.roles["unk"]
    built = Tokenizer(
        BPE(
            dict(vocabulary.ids),
            merges_by_score(keys, vocabulary),
            byte_fallback=True,
            unk_token=None if unk is None else vocabulary.tokens[unk],
        )
    )
    prefix = keys.get("tokenizer.ggml.add_space_prefix", bool, True)
    replaced = normalizers.Replace(" ", _SPACE)
    built.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replaced]) if prefix else replaced
    stripped = [decoders.Strip(" ", 1, 0)] if prefix else []
    built.decoder = decoders.Sequence([*_spaces(True), decoders.ByteFallback(), decoders.Fuse(), *stripped])
    return built


def _spaces(escaped: bool) -> list[decoders.Decoder]:
    return [decoders.Replace(_SPACE, " ")] if escaped else []


def _added(keys: FileKeys, vocabulary: Vocabulary) -> Iterator[AddedToken]:
    """Yield the tokens that are split off text before it is merged."""
    found = vocabulary.of(*_SPECIAL, TokenType.USER_DEFINED)
    left, right = _stripping(keys, {vocabulary.tokens[one] for one in found})
    for one in found:
        token = vocabulary.tokens[one]
        special = vocabulary.types[one] in _SPECIAL
        yield AddedToken(token, special=special, normalized=False, lstrip=token in left, rstrip=token in right)


def _stripping(keys: FileKeys, tokens: set[str]) -> tuple[set[str], set[str]]:
    """Return those of ``tokens`` that take along the white space before them, and after them. Files do not state it;
    llama.cpp knows it by the names of models and pre-tokenizers.
    Raises UnsupportedModelError if white space may be dropped that is a token."""
    name = keys.get("general.name", str, "").lower()
    if any(one in keys.get("tokenizer.ggml.pre", str, "") for one in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
        return {"<mask>"}, set()
    if "phi-3" in name or "phi3" in name:
        if white := next((one for one in sorted(tokens) if one[0].isspace()), None):
            raise UnsupportedModelError(
                f"'{keys.file}' has the special token {white!r}, and white space after a special token is dropped in "
                "models of the name Phi-3, both of which kvkeep cannot do; use another file of the model."
            )
        return set(), tokens - {"<unk>", "<s>", "<|endoftext|>"}
    return ({"[MASK]"} if "modern-bert" in name else set()), set()


def _template(vocabulary: Vocabulary) -> TemplateProcessing:
    """Return what adds the tokens of the beginning and the end to a text."""
    added = {"bos": vocabulary.add_bos, "eos": vocabulary.add_eos}
    ids = {role: one for role in added if added[role] and (one := vocabulary.roles[role]) is not None}

    def around(name: str, number: int) -> list[str]:
        return [f"{part}:{number}" for part in ("bos", f"${name}", "eos") if part in ids or part[0] == "$"]

    return TemplateProcessing(
        single=around("A", 0),
        pair=[*around("A", 0), *around("B", 1)],
        special_tokens=[{"id": role, "ids": [one], "tokens": [vocabulary.tokens[one]]} for role, one in ids.items()],
    )


def _wrapped(
    built: Tokenizer, vocabulary: Vocabulary, templates: str | dict[str, str] | None
) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), clean_up_tokenization_spaces=False)
    tokenizer._tokenizer = built  # the constructor copies its argument by way of JSON, which takes seconds
    for role in ("bos", "eos", "unk", "sep", "pad", "mask"):
        one = vocabulary.roles[role]
        if one is not None:
            setattr(tokenizer, f"{role}_token", vocabulary.tokens[one])  # a parameter would make it a special token
    tokenizer.chat_template = templates
    tokenizer.kvkeep_begins_chats = vocabulary.add_bos  # also where a template does not write the token
    return tokenizer
