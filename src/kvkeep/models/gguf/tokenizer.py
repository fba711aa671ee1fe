"""The tokenizer of a GGUF file: what ``tokenizers`` builds of its vocabulary, with llama.cpp's token ids.

``tokenizer(text)`` gives the ids of ``llama_tokenize`` with special tokens added and parsed, and
``split_special_tokens=True`` those without parsing them. Text of tokens is what llama.cpp writes while it generates: the
spaces before punctuation that its ``llama_detokenize`` takes out for some pre-tokenizers (``clean_spaces``) stay.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvkeep.models.gguf.keys import Keys
from kvkeep.models.gguf.merges import listed_merges, merges_by_score
from kvkeep.models.gguf.pre_tokenizers import PreTokenizer
from kvkeep.models.gguf.templates import templates_of
from kvkeep.models.gguf.vocabulary import Type, Vocabulary, vocabulary_of

_SPACE = "▁"
_SPECIAL = (Type.CONTROL, Type.UNKNOWN)
"""Types of tokens whose names are text where special tokens are not parsed."""


def tokenizer_of(keys: Keys, pre: str | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a file; ``pre``: the name of a pre-tokenizer to use instead of the file's.

    Raises ModelError for a file whose vocabulary, merges or templates contradict themselves, UnsupportedModelError for
    a kind of tokenizer, or a pre-tokenizer, that kvkeep does not know.
    """
    vocabulary = vocabulary_of(keys, pre)
    splits = vocabulary.kind.pre
    built = _with_merges(keys, vocabulary, splits) if splits else _with_scores(keys, vocabulary)
    built.add_tokens(list(_added(vocabulary)))
    built.post_processor = _template(vocabulary)
    return _wrapped(built, vocabulary, templates_of(keys))


def end_ids(keys: Keys, pre: str | None = None) -> tuple[int, ...]:
    """Return the ids of all tokens that end a generation, in ascending order."""
    return vocabulary_of(keys, pre).ends


def _with_merges(keys: Keys, vocabulary: Vocabulary, splits: PreTokenizer) -> Tokenizer:
    merges = listed_merges(keys, vocabulary.ids)
    model = BPE(vocabulary.ids, merges, ignore_merges=splits.ignore_merges, byte_fallback=not splits.bytes_as_letters)
    built = Tokenizer(model)
    steps = [pre_tokenizers.Split(Regex(one), how) for one, how in splits.expressions]
    if splits.bytes_as_letters:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        built.decoder = decoders.ByteLevel()
    else:
        built.decoder = decoders.Sequence([*_spaces(splits.escaped_spaces), decoders.ByteFallback(), decoders.Fuse()])
    if splits.escaped_spaces:
        built.normalizer = normalizers.Replace(" ", _SPACE)
    built.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return built


def _with_scores(keys: Keys, vocabulary: Vocabulary) -> Tokenizer:
    unk = vocabulary.roles["unk"]
    model = BPE(
        vocabulary.ids,
        merges_by_score(keys, vocabulary),
        byte_fallback=True,
        unk_token=None if unk is None else vocabulary.tokens[unk],
    )
    built = Tokenizer(model)
    prefix = keys.get("tokenizer.ggml.add_space_prefix", bool, True)
    replaced = normalizers.Replace(" ", _SPACE)
    built.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replaced]) if prefix else replaced
    stripped = [decoders.Strip(" ", 1, 0)] if prefix else []
    built.decoder = decoders.Sequence([*_spaces(True), decoders.ByteFallback(), decoders.Fuse(), *stripped])
    return built


def _spaces(escaped: bool) -> list[decoders.Decoder]:
    return [decoders.Replace(_SPACE, " ")] if escaped else []


def _added(vocabulary: Vocabulary) -> Iterator[AddedToken]:
    """Return the tokens that are split off text before it is merged."""
    for one in vocabulary.of(*_SPECIAL, Type.USER_DEFINED):
        special = vocabulary.types[one] in _SPECIAL
        yield AddedToken(vocabulary.tokens[one], special=special, normalized=False)


def _template(vocabulary: Vocabulary) -> TemplateProcessing:
    """Return what adds the tokens of the beginning and the end to a text."""
    first, last = (
        vocabulary.roles[role] if added else None
        for role, added in (("bos", vocabulary.add_bos), ("eos", vocabulary.add_eos))
    )
    names = {one: vocabulary.tokens[one] for one in (first, last) if one is not None}

    def text(name: str, number: int) -> list[str]:
        parts = [names.get(first), f"${name}", names.get(last)]
        return [f"{part}:{number}" for part in parts if part is not None]

    return TemplateProcessing(
        single=text("A", 0),
        pair=[*text("A", 0), *text("B", 1)],
        special_tokens=[(name, one) for one, name in names.items()],
    )


def _wrapped(
    built: Tokenizer, vocabulary: Vocabulary, templates: str | dict[str, str] | None
) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, clean_up_tokenization_spaces=False)
    for role in ("bos", "eos", "unk", "sep", "pad", "mask"):
        one = vocabulary.roles[role]
        if one is not None:
            setattr(tokenizer, f"{role}_token", vocabulary.tokens[one])  # a parameter would make it a special token
    tokenizer.chat_template = templates
    return tokenizer
