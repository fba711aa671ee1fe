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

import re
from collections.abc import Iterable, Iterator, Mapping

from jinja2 import meta
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from kvkeep.errors import ModelError, UnsupportedModelError, out_of_memory
from kvkeep.models.chat_templates import compiled
from kvkeep.models.gguf.facts import FileKeys
from kvkeep.models.gguf.pre_tokenizers import PreTokenizer
from kvkeep.models.gguf.vocabulary import TokenType, Vocabulary
from kvkeep.models.model_files import check_names
from kvkeep.native.room import has_room

Merge = tuple[str, str]

_SPACE = "▁"
_TOKEN_BYTES, _LEAST_BYTES = 1600, 32 << 20
"""Memory that building a tokenizer takes at most: for each token (measured: 1,200 with 262,144 tokens), and beyond."""
_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)
"""Types of tokens whose names are text where special tokens are not parsed."""


def build_tokenizer(keys: FileKeys, vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a file whose vocabulary was read. Raises ModelError for one whose merges or templates
    contradict themselves, UnsupportedModelError for one that kvkeep cannot build."""
    count = len(vocabulary.ids)
    if not has_room(_LEAST_BYTES + _TOKEN_BYTES * count):  # the library itself would end the process
        raise out_of_memory(f"a tokenizer of {count:,} tokens")
    splits = vocabulary.splits
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
    steps = list[pre_tokenizers.PreTokenizer]()
    steps += (pre_tokenizers.Split(Regex(one), how) for one, how in splits.expressions)
    if splits.bytes_as_letters:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        if missing := set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.ids.keys():  # bytes that have no token
            steps.append(pre_tokenizers.Split(Regex(f"[{_escaped(sorted(missing))}]"), "removed"))
        built.decoder = decoders.Sequence([*_verbatim(vocabulary), decoders.ByteLevel()])
    else:
        built.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
        built.normalizer = normalizers.Replace(" ", _SPACE)
    built.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return built


def _escaped(letters: Iterable[str]) -> str:
    return "".join(rf"\x{{{ord(letter):X}}}" for letter in letters)


def _verbatim(vocabulary: Vocabulary) -> Iterator[decoders.Decoder]:
    """Yield what keeps the text of special tokens that spell bytes otherwise: ``ø`` is not the byte 0xF8."""
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for one in vocabulary.of(*_SPECIAL, TokenType.USER_DEFINED):
        text = vocabulary.tokens[one]
        if not text.isascii() and letters.issuperset(text):
            spelled = "".join(piece for piece, _ in step.pre_tokenize_str(text))
            yield decoders.Replace(Regex(rf"\A{_escaped(text)}\z"), spelled)


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
    built.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return built


def _added(keys: FileKeys, vocabulary: Vocabulary) -> Iterator[AddedToken]:
    """Yield the tokens that are split off text before it is merged. In models of the name Phi-3 they take along the
    white space after them: files do not state it, and llama.cpp knows it by the name.
    Raises UnsupportedModelError if white space may be dropped that is a token."""
    found = {one: vocabulary.tokens[one] for one in vocabulary.of(*_SPECIAL, TokenType.USER_DEFINED)}
    stripping = re.search("phi-?3", keys.get("general.name", str, "").lower()) is not None
    if stripping and (white := next((token for token in found.values() if token[0].isspace()), None)):
        raise UnsupportedModelError(
            f"'{keys.file}' has the special token {white!r}, and white space after a special token is dropped in "
            "models of the name Phi-3, both of which kvkeep cannot do; use another file of the model."
        )
    for one, token in found.items():
        strips = stripping and token not in ("<unk>", "<s>", "<|endoftext|>")
        yield AddedToken(token, special=vocabulary.types[one] in _SPECIAL, normalized=False, rstrip=strips)


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


def listed_merges(keys: FileKeys, ids: Mapping[str, int]) -> list[Merge]:
    """Return the merges that a file lists, the first ones first. The first of two equal ones counts.
    Raises ModelError if one has no two parts, or names a token that the vocabulary ``ids`` does not have."""
    keys.need("tokenizer.ggml.merges", list)
    listed = keys.items("tokenizer.ggml.merges", str)
    merges = [_parts(merge) for merge in listed]
    for number, (left, right) in enumerate(merges):
        if left not in ids or right not in ids or left + right not in ids:
            missing = next(one for one in (left, right, left + right) if one not in ids)
            why = f"names {missing[:40]!r}, which is no token" if right else "has no two parts"
            raise keys.damaged(f"merge {number + 1:,}, {listed[number][:40]!r}, {why}")
    return merges if len(set(listed)) == len(listed) else list(dict.fromkeys(merges))


def _parts(merge: str) -> Merge:
    """Return the two parts of a merge. The first may begin with a space."""
    left, _, right = merge.partition(" ")
    if not left:
        left, _, right = merge[1:].partition(" ")
        left = f" {left}"
    return left, right


def merges_by_score(keys: FileKeys, vocabulary: Vocabulary) -> list[Merge]:
    """Return the merges of a vocabulary whose tokens have scores: any two tokens that make a third are one, and the
    token with the highest score comes first.

    Where tokens have the same score, the leftmost merge of a text comes first. That is so here if the merges with the
    longest left part come first: a run of spaces then grows from its beginning.
    Raises ModelError if there is not one score for each token, and UnsupportedModelError if a token has a character
    that is none: merges do not reach it.
    """
    ids = vocabulary.ids
    keys.need("tokenizer.ggml.scores", list)
    scores = keys.items("tokenizer.ggml.scores", float)
    if len(scores) != len(ids):
        raise keys.damaged(f"its vocabulary has {len(ids):,} tokens and {len(scores):,} scores")
    missing = set("".join(ids)).difference(ids, " ")  # a space is written ▁ before merges
    for token, one in ids.items() if missing else ():
        if len(token) > 1 and one not in vocabulary.types and not missing.isdisjoint(token) and " " not in token:
            raise UnsupportedModelError(
                f"The token {token[:40]!r} of '{keys.file}' has a character that is no token, and kvkeep cannot build "
                "such a tokenizer; use another file of the model."
            )
    parts = set(ids).difference(vocabulary.tokens[one] for one in vocabulary.of(TokenType.BYTE))
    found = [
        (-score, -at, at - len(token), left, right)
        for token, score in zip(ids, scores, strict=True)
        for at in range(1, len(token))
        if (left := token[:at]) in parts and (right := token[at:]) in parts
    ]
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def templates_of(keys: FileKeys) -> str | dict[str, str] | None:
    """Return the chat template of a file, several by name (``default``, ``tool_use``), or None.
    Raises ModelError for one that jinja does not compile, or that needs another file."""
    key, default = "tokenizer.chat_template", "default"
    named = {default: keys.get(key, str)} if key in keys else {}
    keys.get(f"{key}s", list)  # the names
    named |= {one.removeprefix(f"{key}."): keys.get(one, str) for one in keys.metadata if one.startswith(f"{key}.")}
    for name, template in named.items():
        which = f"chat template '{name}'" if name != default else "chat template"
        try:
            environment = compiled(template).environment
        except ModelError as error:
            raise ModelError(
                f"The {which} of '{keys.file}' cannot be compiled: {error}; take it out of the file."
            ) from None
        if (other := next(meta.find_referenced_templates(environment.parse(template)), "")) != "":
            raise ModelError(
                f"The {which} of '{keys.file}' needs another file, {str(other)[:80]!r}; take it out of the file."
            )
    return named.get(default) if not named.keys() - {default} else named
