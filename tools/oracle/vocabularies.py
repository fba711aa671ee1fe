"""Tiny vocabularies, trained on the corpus, and the files that are made of them."""

from __future__ import annotations

import json
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
"""Types of tokens, as ``gguf.TokenType`` numbers them."""
CONTROLS = ["<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<start_of_turn>"]
USERS = ["<think>", "</think>", "<tool_call>", "[INST]", "    "]
IGNORED_MERGES = ["Hello", "Ġsystem", "ĠMedin", "Ġdetokenize", "Error", "æĹ¥æľ¬", "333", "ĊĊĊ"]
"""Tokens of the byte-level vocabulary that no merge makes."""
RAW = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")
"""Pre-tokenizers whose vocabularies are not byte-level."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "▁"


def byte_level(texts: list[str]) -> dict[str, Any]:
    """A byte-level vocabulary: merges of whole texts, which cross what a split keeps apart, and merges of words."""
    split, whole = (_trained(texts, pre_tokenizers.ByteLevel(False, use_regex=regex)) for regex in (True, False))
    merges = _in_turn(split, whole)
    tokens = ["<unk>", *CONTROLS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    tokens = list(dict.fromkeys([*tokens, *IGNORED_MERGES, *USERS]))
    return {"tokens": tokens, "types": _types(tokens), "merges": [" ".join(merge) for merge in merges]}


def sentencepiece(texts: list[str]) -> dict[str, Any]:
    """A sentencepiece vocabulary: pieces have scores, bytes are tokens."""
    metaspace = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=True)
    merges = _trained([text.replace("\n", " ") for text in texts], metaspace, characters=200)
    characters = sorted({character for merge in merges for character in "".join(merge)} | {SPACE})
    pieces = list(dict.fromkeys([*("".join(merge) for merge in merges), SPACE * 2, SPACE * 4, SPACE * 8]))
    tokens = ["<unk>", *CONTROLS, *BYTES, *USERS, "\n\n", *pieces, *characters]
    tokens = list(dict.fromkeys(tokens))
    types = _types(tokens, UNKNOWN)
    ranks = [pieces.index(token) if token in pieces else len(pieces) for token in tokens]
    scores = [-float(rank) if kind == NORMAL else 0.0 for rank, kind in zip(ranks, types, strict=True)]
    return {"tokens": tokens, "types": types, "scores": scores}


def spaces_escaped(texts: list[str]) -> dict[str, Any]:
    """A vocabulary of Gemma 4's kind: merges as in BPE, spaces and bytes as in sentencepiece."""
    split, whole = (
        _trained(texts, pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=split), characters=200)
        for split in (True, False)
    )
    merges = _in_turn(split, whole)
    lines = [("\n" * length, "\n") for length in (1, 2, 3)]
    merges += [merge for merge in lines if merge not in merges]
    characters = sorted({character for merge in merges for character in "".join(merge)} | {SPACE})
    tokens = ["<pad>", *CONTROLS, *BYTES, *("".join(merge) for merge in merges), *characters, *USERS[:4]]
    tokens = list(dict.fromkeys(tokens))
    return {"tokens": tokens, "types": _types(tokens), "merges": [" ".join(merge) for merge in merges]}


def _trained(texts: list[str], split: Any, characters: int | None = None) -> list[tuple[str, str]]:
    """Merges in the order in which they were learned."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = split
    kept: dict[str, Any] = {"limit_alphabet": characters}
    if characters is None:
        kept = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    size = (characters or 256) + 350
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **kept)
    trained.train_from_iterator(sorted(texts), trainer)
    return [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]


def _in_turn(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The merges of both in turn, each once."""
    return list(dict.fromkeys(merge for pair in zip_longest(one, other) for merge in pair if merge))


def _types(tokens: list[str], unknown: int = CONTROL) -> list[int]:
    known = dict.fromkeys(CONTROLS, CONTROL) | dict.fromkeys([*USERS, "\n\n"], USER) | dict.fromkeys(BYTES, BYTE)
    return [(known | {"<unk>": unknown, "<pad>": CONTROL}).get(token, NORMAL) for token in tokens]


def pre_tokenizers_of(llama_cpp: Path) -> list[str]:
    """The names that llama.cpp compares ``tokenizer.ggml.pre`` with when it chooses a pre-tokenizer, in its order."""
    source = (llama_cpp / "src" / "llama-vocab.cpp").read_text("utf-8")
    return list(dict.fromkeys(re.findall(r'tokenizer_pre == "([^"]+)"', source)))


def files(names: list[str]) -> dict[str, dict[str, Any]]:
    """Each file: its vocabulary, and the keys that it has besides. ``names``: of pre-tokenizers."""
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    plain = {
        f"pre:{name}": {
            "vocabulary": "escaped" if name in RAW else "bytes",
            "model": "gpt2",
            "keys": ids | {"pre": name},
        }
        for name in names
    }
    variants: dict[str, dict[str, Any]] = {
        "spm": {},
        "spm:space": {"add_space_prefix": True},
        "spm:no-space": {"add_space_prefix": False},
        "spm:no-bos": {"add_bos_token": False},
        "spm:eos": {"add_eos_token": True, "add_space_prefix": False},
        "spm:phi-3": {"general.name": "Phi-3 mini"},
    }
    spm = {
        name: {"vocabulary": "pieces", "model": "llama", "keys": ids | {"unknown_token_id": 0} | keys}
        for name, keys in variants.items()
    }
    own: dict[str, dict[str, Any]] = {
        "bytes:no-pre": ids,
        "bytes:bos-eos": ids | {"pre": "qwen2", "add_bos_token": True, "add_eos_token": True},
        "bytes:llama-no-bos": ids | {"pre": "llama-bpe", "add_bos_token": False},
        "bytes:space": ids | {"pre": "gpt-2", "add_space_prefix": True},
        "bytes:phi-3": ids | {"pre": "gpt-2", "general.name": "Phi-3 mini"},
    }
    bytes_ = {name: {"vocabulary": "bytes", "model": "gpt2", "keys": keys} for name, keys in own.items()}
    gemma = {"gemma4": {"vocabulary": "escaped", "model": "gemma4", "keys": ids}}
    return plain | bytes_ | spm | gemma


ENDS: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "none": ({"a": NORMAL}, {}),
    "eos": ({"<eos>": CONTROL, "<x>": CONTROL}, {"eos": "<x>"}),
    "eot": ({"<x>": CONTROL, "<y>": CONTROL, "<z>": CONTROL}, {"eos": "<x>", "eot": "<y>", "eom": "<z>"}),
    "llama3": ({"<|end_of_text|>": CONTROL, "<|eot_id|>": CONTROL, "<|eom_id|>": CONTROL}, {"eos": "<|end_of_text|>"}),
    "chatml": ({"<|endoftext|>": CONTROL, "<|im_end|>": CONTROL, "<|im_start|>": CONTROL}, {"eos": "<|im_end|>"}),
    "normal": ({"<|im_end|>": NORMAL, "</s>": NORMAL, "<end_of_turn>": USER, "<x>": CONTROL}, {"eos": "<x>"}),
    "gemma": ({"<eos>": CONTROL, "<end_of_turn>": CONTROL, "<start_of_turn>": CONTROL}, {"eos": "<eos>"}),
    "phi": ({"<|end|>": CONTROL, "<|endoftext|>": CONTROL, "<|user|>": CONTROL}, {"eos": "<|endoftext|>"}),
    "harmony": (dict.fromkeys(("<|end|>", "<|return|>", "<|call|>", "<|message|>"), CONTROL), {"eos": "<|return|>"}),
    "solar": (dict.fromkeys(("<|end|>", "<|flush|>", "<|calls|>"), CONTROL), {"eos": "<|flush|>"}),
    "code": (
        dict.fromkeys(("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|im_end|>"), CONTROL),
        {"eos": "<|im_end|>"},
    ),
    "kimi": (dict.fromkeys(("[EOS]", "[EOT]", "[PAD]"), CONTROL), {"eos": "[EOS]"}),
    "gemma4": (dict.fromkeys(("<eos>", "<turn|>", "<|tool_response>", "</s>"), CONTROL), {"eos": "<eos>"}),
    "deepseek": ({"<｜end▁of▁sentence｜>": CONTROL, "<EOT>": CONTROL}, {"eos": "<｜end▁of▁sentence｜>"}),
    "minimax": ({"[e~[": CONTROL, "<end_of_utterance>": CONTROL, "<x>": CONTROL}, {"eos": "<x>"}),
}
"""Vocabularies of letters and some more tokens, by type, and which of them the file names as ends."""


def end_files() -> dict[str, dict[str, Any]]:
    """Files that differ in what ends an answer."""
    found = {}
    for name, (added, keys) in ENDS.items():
        tokens = [*"abc", *added]
        ids = {f"{key}_token_id": tokens.index(token) if token in tokens else 99 for key, token in keys.items()}
        types = [*[NORMAL] * 3, *added.values()]
        own = {"tokens": list(dict.fromkeys(tokens)), "types": types, "merges": ["a b"]}
        own["tokens"].append("ab")
        own["types"] = [*types[: len(own["tokens"]) - 1], NORMAL]
        found[name] = {"own": own, "keys": ids | {"pre": "gpt-2"}}
    return found
