"""The merges of byte pair encoding: those that a file lists, and those that follow from the scores of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import add

from kvkeep.errors import ModelError, UnsupportedModelError
from kvkeep.models.gguf.keys import FileKeys
from kvkeep.models.gguf.vocabulary import TokenType, Vocabulary

Merge = tuple[str, str]


def listed_merges(keys: FileKeys, ids: Mapping[str, int]) -> list[Merge]:
    """Return the merges that a file lists, the first ones first. The first of two equal ones counts.
    Raises ModelError if one has no two parts, or names a token that the vocabulary ``ids`` does not have."""
    keys.need("tokenizer.ggml.merges", list)
    listed = keys.items("tokenizer.ggml.merges", str)
    merges = [_parts(merge) for merge in listed]
    lefts, rights = [left for left, _ in merges], [right for _, right in merges]
    if not all(map(ids.__contains__, chain(lefts, rights, map(add, lefts, rights)))):
        raise _wrong(keys, merges, listed, ids)
    return merges if len(set(listed)) == len(listed) else list(dict.fromkeys(merges))


def _parts(merge: str) -> Merge:
    """Return the two parts of a merge. The first may begin with a space."""
    left, _, right = merge.partition(" ")
    if not left:
        left, _, right = merge[1:].partition(" ")
        left = f" {left}"
    return left, right


def _wrong(keys: FileKeys, merges: list[Merge], listed: list[str], ids: Mapping[str, int]) -> ModelError:
    number, (left, right) = next(
        (number, (left, right))
        for number, (left, right) in enumerate(merges)
        if left not in ids or right not in ids or left + right not in ids
    )
    missing = next(one for one in (left, right, left + right) if one not in ids)
    why = f"names {missing[:40]!r}, which is no token" if right else "has no two parts"
    return ModelError(
        f"'{keys.file}' is damaged: merge {number + 1:,}, {listed[number][:40]!r}, {why}; fetch it again."
    )


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
        raise ModelError(
            f"'{keys.file}' is damaged: its vocabulary has {len(ids):,} tokens and {len(scores):,} scores; fetch it "
            "again."
        )
    _check_characters(keys, vocabulary)
    parts = set(ids).difference(vocabulary.tokens[one] for one in vocabulary.of(TokenType.BYTE))
    found = [
        (-score, -at, at - len(token), left, right)
        for token, score in zip(ids, scores, strict=True)
        for at in range(1, len(token))
        if (left := token[:at]) in parts and (right := token[at:]) in parts
    ]
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _check_characters(keys: FileKeys, vocabulary: Vocabulary) -> None:
    missing = set("".join(vocabulary.ids)).difference(vocabulary.ids, " ")  # a space is written ▁ before merges
    if not missing:
        return
    for token, one in vocabulary.ids.items():
        if len(token) > 1 and one not in vocabulary.types and not missing.isdisjoint(token) and " " not in token:
            raise UnsupportedModelError(
                f"The token {token[:40]!r} of '{keys.file}' has a character that is no token, and kvkeep cannot build "
                "such a tokenizer; use another file of the model."
            )
