"""The vocabulary of a GGUF file: its tokens, their types and roles, by llama.cpp's rules (src/llama-vocab.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

from kvkeep.errors import UnsupportedModelError, UsageError, unknown
from kvkeep.models.gguf.facts import FileKeys
from kvkeep.models.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer, pre_tokenizer


class TokenType(IntEnum):
    """Types of tokens, by their number in a file."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file."""

    splits: PreTokenizer | None
    """How text is split before merges; None: tokens are merged by their scores (sentencepiece)."""
    ids: Mapping[str, int] = field(repr=False)
    """Ids by token, in their order."""
    types: Mapping[int, TokenType] = field(repr=False)
    """The types of tokens that are not normal, by id."""
    roles: Mapping[str, int | None]
    """Ids by role (bos, eos, unk, fim_pre and others)."""
    ends: tuple[int, ...]
    """Ids of all tokens that end a generation, in ascending order."""
    add_bos: bool
    """Whether a text begins with the token of the beginning."""
    add_eos: bool
    """Whether a text ends with the token of the end."""

    @cached_property
    def tokens(self) -> list[str]:
        """The tokens by id."""
        return list(self.ids)

    def of(self, *types: TokenType) -> list[int]:
        """Return the ids of tokens of any of ``types``, in ascending order."""
        return sorted(one for one, its in self.types.items() if its in types)


def vocabulary_of(keys: FileKeys, pre: str | None = None) -> Vocabulary:
    """Return the vocabulary of a file; ``pre``: the name of a pre-tokenizer to use instead of the file's.
    Raises ModelError for one that contradicts itself, UnsupportedModelError for a kind or a pre-tokenizer that kvkeep
    does not know, UsageError for such a ``pre``."""
    splits = _splits(keys, pre)
    keys.need("tokenizer.ggml.tokens", list)
    listed = keys.items("tokenizer.ggml.tokens", str)
    ids = {token or f"[EMPTY_{one}]": one for one, token in enumerate(listed)}
    if len(ids) < len(listed):
        twice = next(token for one, token in enumerate(listed) if ids.get(token, one) != one)
        raise keys.damaged(f"its vocabulary has the token {twice[:40]!r} twice")
    types = _types(keys, len(listed))
    roles = _stated_roles(keys, splits, len(ids))
    there = ((role, next((ids[one] for one in names if one in ids), None)) for role, names in _ROLE_NAMES.items())
    named = {role: one for role, one in there if one is not None and roles[role] is None}
    roles |= named
    by_name = {ids[name] for name in _END_NAMES if name in ids}
    found = by_name | {one for role in _END_ROLES if (one := roles[role]) is not None}
    types |= dict.fromkeys(by_name.union(named.values()), TokenType.CONTROL)
    types |= dict.fromkeys((ids[name] for name in _SHOWN_NAMES if name in ids), TokenType.USER_DEFINED)
    ends = found - _no_ends(ids, found, types)
    add_bos = keys.get("tokenizer.ggml.add_bos_token", bool, splits is None or splits.add_bos)
    add_bos = add_bos or (splits is not None and splits.always_bos)
    add_eos = keys.get("tokenizer.ggml.add_eos_token", bool, False)
    for role, added in (("bos", add_bos), ("eos", add_eos)):
        if added and roles[role] is None:
            raise keys.damaged(f"it has a token added to each text and does not state which ({role}_token_id)")
    return Vocabulary(splits, ids, types, roles, tuple(sorted(ends)), add_bos, add_eos)


def _splits(keys: FileKeys, pre: str | None) -> PreTokenizer | None:
    name, stated = keys.need("tokenizer.ggml.model", str), keys.get("tokenizer.ggml.pre", str, "")
    if name not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedModelError(
            f"'{keys.file}' has a tokenizer of a kind that kvkeep cannot build, {name[:80]!r}; use a model with one of "
            "the kind gpt2, llama or gemma4."
        )
    if name == "llama":
        if pre is not None:
            raise UsageError(f"'{keys.file}' merges tokens by their scores and splits no text before; leave --pre out.")
        return None
    if pre and pre not in PRE_TOKENIZERS:
        raise unknown("pre-tokenizer", pre, PRE_TOKENIZERS)
    return pre_tokenizer(("gemma4" if name == "gemma4" else stated or "default") if pre is None else pre)


def _types(keys: FileKeys, count: int) -> dict[int, TokenType]:
    """Return the types of the tokens that are not normal, by id."""
    stated = keys.items("tokenizer.ggml.token_type", int, [int(TokenType.NORMAL)] * count)
    if len(stated) != count:
        raise keys.damaged(f"its vocabulary has {count:,} tokens and the types of {len(stated):,}")
    known = set(TokenType)
    return {
        one: TokenType(number) if number in known else TokenType.UNDEFINED
        for one, number in enumerate(stated)
        if number != TokenType.NORMAL
    }


_ROLE_KEYS = {"unk": "unknown_token_id", "sep": "seperator_token_id", "pad": "padding_token_id"}
"""The keys of roles, where they are not ``ROLE_token_id``."""
_OLD_ROLE_KEYS = {"fim_pre": "prefix_token_id", "fim_suf": "suffix_token_id", "fim_mid": "middle_token_id"}
_ROLE_NAMES = {
    "eot": (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
        "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
"""The names by which a role is found that a file does not state."""
_END_NAMES = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
"""The names of tokens that end a generation."""
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SHOWN_NAMES = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Tokens of gpt-oss that are shown in text, whatever their type."""


def _stated_roles(keys: FileKeys, splits: PreTokenizer | None, count: int) -> dict[str, int | None]:
    """Return the ids of the roles that the file states, or that its kind of tokenizer has by default."""
    roles: dict[str, int | None] = {}
    if splits is None:
        defaults: dict[str, int | None] = {"bos": 1, "eos": 2, "unk": 0}
    else:
        gpt2 = keys.metadata["tokenizer.ggml.model"] == "gpt2"
        defaults = {"bos": splits.default_bos, "eos": 11} if gpt2 else {}
    for role in ("bos", "eos", "unk", "sep", "pad", "mask", *_ROLE_NAMES):
        default = defaults.get(role)
        roles[role] = default if default is not None and default < count else None
        for name in (_ROLE_KEYS.get(role, f"{role}_token_id"), _OLD_ROLE_KEYS.get(role)):
            stated = keys.get(f"tokenizer.ggml.{name}", int) if name else None
            if stated is not None:
                if not 0 <= stated < count:
                    raise keys.damaged(f"its {name} is {stated}, and its vocabulary has {count:,} tokens")
                roles[role] = stated
    return roles


def _no_ends(ids: Mapping[str, int], ends: set[int], types: dict[int, TokenType]) -> set[int]:
    """Return the ids that are no ends beside others, and give them the type that they have then: ``<|end|>`` where
    other tokens end a message (gpt-oss, Solar), ``</s>`` where it is text (Gemma 4)."""

    def has(*names: str) -> bool:
        return any(ids.get(name) in ends for name in names)

    found: set[int] = set()
    if has("<|end|>") and has("<|call|>", "<|calls|>") and has("<|return|>", "<|flush|>"):
        found.add(ids["<|end|>"])
        types[ids["<|end|>"]] = TokenType.USER_DEFINED
    if has("</s>") and has("<|tool_response>", "<|plamo:eos|>"):
        found.add(ids["</s>"])
        types.pop(ids["</s>"], None)
    return found
