"""GGUF files of the tiny vocabularies in ``models/records``, as llama.cpp read them when it was asked."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy
from gguf import GGUFWriter

RECORDS = Path(__file__).parent / "models" / "records"
WHOLE = ["", "Hello", " Hello\n", "<s>Hello</s> "]
"""Texts whose ids are recorded with those that begin and end a text."""


def unpacked(name: str) -> Any:
    """A packed record."""
    return json.loads(lzma.decompress((RECORDS / name).read_bytes()))


def write_vocabulary(path: Path, vocabulary: dict[str, Any], model: str, keys: dict[str, Any]) -> None:
    """Write a Llama of no layers. ``keys``: those without a dot are of ``tokenizer.ggml``."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary["tokens"]))
    writer.add_tokenizer_model(model)
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
    if "merges" in vocabulary:
        writer.add_token_merges(vocabulary["merges"])
    for key, value in keys.items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(name, value)
    writer.add_tensor("token_embd.weight", numpy.zeros((len(vocabulary["tokens"]), 8), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_from(path: Path) -> Any:
    """The tokenizer that kvkeep makes of a GGUF file."""
    return tokenizer_of(_keys(path))


def tokenizer_of(keys: Any, pre: str | None = None) -> Any:
    """The tokenizer of a file with these keys."""
    from kvkeep.models.gguf.tokenizer import build_tokenizer
    from kvkeep.models.gguf.vocabulary import vocabulary_of

    return build_tokenizer(keys, vocabulary_of(keys, pre))


def ends_from(path: Path) -> list[int]:
    """The ids that end an answer, as kvkeep reads them from a GGUF file."""
    from kvkeep.models.gguf.vocabulary import vocabulary_of

    return list(vocabulary_of(_keys(path)).ends)


def _keys(path: Path) -> Any:
    from kvkeep.models.gguf.facts import FileKeys
    from kvkeep.models.gguf.header import read_header

    return FileKeys(path, read_header(path).metadata)


def ids_of(tokenizer: Any, texts: list[str], special: bool = False, add: bool = False) -> list[list[int]]:
    """Ids of texts. ``special``: names of special tokens in them are these tokens. ``add``: with those that begin and
    end a text."""
    return tokenizer(texts, add_special_tokens=add, split_special_tokens=not special)["input_ids"]
