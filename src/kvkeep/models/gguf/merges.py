"""The merges of byte pair encoding: those that a file lists, and those that follow from the scores of its tokens."""

from __future__ import annotations

from collections.abc import Mapping

from kvkeep.errors import ModelError
from kvkeep.models.gguf.keys import Keys
from kvkeep.models.gguf.vocabulary import Type, Vocabulary


def listed_merges(keys: Keys, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges that a file lists, the first ones first. The first of two equal ones counts.
    Raises ModelError if one has no two parts, or names a token that the vocabulary ``ids`` does not have."""
    keys.need("tokenizer.ggml.merges", list)
    listed = keys.items("tokenizer.ggml.merges", str)
    merges = []
    for number, merge in enumerate(listed):
        at = merge.find(" ", 1)  # a first part may begin with a space
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or not right or left not in ids or right not in ids or left + right not in ids:
            raise _wrong(keys, number, merge, ids)
        merges.append((left, right))
    unique = dict.fromkeys(merges)
    return merges if len(unique) == len(merges) else list(unique)


def _wrong(keys: Keys, number: int, merge: str, ids: Mapping[str, int]) -> ModelError:
    left, _, right = merge.partition(" ")
    missing = [one for one in (left, right, left + right) if one not in ids] if left and right else []
    why = f"names no token of its vocabulary ({missing[0][:40]!r})" if missing else "has no two parts"
    return ModelError(f"'{keys.file}' is damaged: merge {number + 1:,}, {merge[:40]!r}, {why}; fetch it again.")


def merges_by_score(keys: Keys, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges of a vocabulary whose tokens have scores: any two tokens that make a third are one, and the
    token with the highest score comes first.

    Where several tokens have the same score, the leftmost merge of a text comes first. That is so here if the merges
    with the longest left part come first: a run of spaces then grows from its beginning.
    Raises ModelError if there is not one score for each token.
    """
    ids = vocabulary.ids
    keys.need("tokenizer.ggml.scores", list)
    scores = keys.items("tokenizer.ggml.scores", float)
    if len(scores) != len(ids):
        raise ModelError(
            f"'{keys.file}' is damaged: its vocabulary has {len(ids):,} tokens and {len(scores):,} scores; fetch it again."
        )
    bytes_ = {vocabulary.tokens[one] for one in vocabulary.of(Type.BYTE)}
    found = []
    for token, score in zip(ids, scores, strict=True):
        for at in range(1, len(token)):
            left = token[:at]
            if left in ids and (right := token[at:]) in ids and left not in bytes_ and right not in bytes_:
                found.append((-score, -at, at - len(token), left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]
