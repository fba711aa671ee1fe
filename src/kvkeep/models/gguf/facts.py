"""What a file states: its keys and tensors. Reading a key notes it: one that was not read is harmless, or the file is
refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from kvkeep.errors import ModelError, UnsupportedModelError
from kvkeep.models.gguf.header import FileTensor, values

T = TypeVar("T", bool, int, float, str, list)
_SHOWN = 60
"""Characters of a value in a message."""
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
MAX_LAYERS = 10_000
MAX_HEAD_DIM = MAX_EXPERTS = 65_536
DRAFTING = ("deepseek2", "exaone-moe", "glm4moe", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next")
"""Architectures whose last layers may be for multi-token prediction (MTP), which kvkeep skips."""
_LAYER, _KEYS = re.compile(r"blk\.(\d+)\."), re.compile(r"\.attn_(k|v|k_norm)\.weight$")


class FileKeys:
    """Values of a file's metadata by key. Reading a key notes it."""

    def __init__(self, file: Path, metadata: Mapping[str, Any]) -> None:
        self.file, self.metadata = file, metadata
        self.read: set[str] = set()
        """The keys that were read."""

    def damaged(self, what: str) -> ModelError:
        """Return the error for a file that contradicts itself."""
        return ModelError(f"'{self.file}' is damaged: {what}; fetch it again.")

    def __contains__(self, key: str) -> bool:
        return key in self.metadata

    def get(self, key: str, kind: type[T], default: T | None = None) -> Any:
        """Return the value of ``key``, or ``default`` if the file does not have it. Numbers in arrays become a list.
        Raises ModelError for a value of another type."""
        self.read.add(key)
        if key not in self.metadata:
            return default
        value = self.metadata[key]
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.damaged(f"its {key} is {str(value)[:40]!r}, not {_NAMES[kind]}")
        return value

    def need(self, key: str, kind: type[T]) -> Any:
        """Return the value of ``key``. Raises ModelError if the file does not have it, or has another type."""
        if key not in self.metadata:
            raise ModelError(f"'{self.file}' cannot be read as a model: it does not state {key}.")
        return self.get(key, kind)

    def items(self, key: str, kind: type[T], default: list[T] | None = None) -> Any:
        """Return the items of a list, all of one type. Raises ModelError for another value."""
        value = self.metadata.get(key)
        kinds = {"b": bool, "i": int, "u": int, "f": float}
        stored = kinds.get(value.dtype.kind) if isinstance(value, np.ndarray) else str
        found = self.get(key, list, default)
        if value is not None and found and stored is not kind and not (kind is float and stored is int):
            raise self.damaged(f"its {key} is a list whose items are not {_NAMES[kind]}")
        return found

    def several(self, key: str, count: int, kind: type[T], default: T | None = None) -> list[Any]:
        """Return ``count`` values of ``key``, one for each layer; a single value counts for all."""
        if isinstance(self.metadata.get(key), list | np.ndarray):
            values = self.items(key, kind)
            if len(values) != count:
                raise self.damaged(f"its {key} has {len(values)} values, not {count}")
            return list(values)
        return [self.get(key, kind, default)] * count

    def shown(self, key: str) -> str:
        """Return the value of ``key`` for a message, shortened, without noting that it was read."""
        value = self.metadata[key]
        if isinstance(value, list | np.ndarray):
            return f"a list of {len(value)}"
        text = repr(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


@dataclass(frozen=True)
class Facts:
    """The keys of an architecture, and the tensors of the file."""

    architecture: str
    keys: FileKeys
    tensors: Mapping[str, FileTensor]

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number with a fraction; ``default`` if the file does not state it."""
        return self.keys.get(f"{self.architecture}.{key}", float, default)

    def count(self, key: str, default: int | None = None) -> Any:
        """Return a whole number; ``default`` if the file does not state it."""
        return self.keys.get(f"{self.architecture}.{key}", int, default)

    def flag(self, key: str, default: bool) -> bool:
        """Return whether the file states ``key``; ``default`` if it does not."""
        return bool(self.keys.get(f"{self.architecture}.{key}", bool, default))

    def need(self, key: str) -> int:
        """Return a whole number. Raises ModelError if the file does not state it."""
        found: int = self.keys.need(f"{self.architecture}.{key}", int)
        return found

    def each(self, key: str, default: int | None = None) -> list[int]:
        """Return a whole number for each layer. Raises ModelError if the file states none and there is no default."""
        if default is None and f"{self.architecture}.{key}" not in self.keys:
            self.need(key)
        return self.keys.several(f"{self.architecture}.{key}", self._blocks, int, default)[: self.layers]

    def kinds(self, key: str, period: str, default: int) -> list[bool]:
        """Return whether ``key`` holds for each layer; without it, true for all layers but each ``period``-th."""
        name = f"{self.architecture}.{key}"
        every = self.count(period, default)
        if every <= 0:
            raise self.keys.damaged(f"its {self.architecture}.{period} is {every}")
        if name not in self.keys:
            return [(layer + 1) % every != 0 for layer in range(self.layers)]
        return self.flags(key)

    def flags(self, key: str) -> list[bool]:
        """Return whether ``key`` holds for each layer. Raises ModelError unless the file states it."""
        stated = self.keys.metadata.get(f"{self.architecture}.{key}")
        count = self.layers if isinstance(stated, list | np.ndarray) and len(stated) == self.layers else self._blocks
        return self.keys.several(f"{self.architecture}.{key}", count, bool)[: self.layers]

    def same(self, key: str, default: int | None = None) -> int:
        """Return a whole number that is the same for all layers. Raises UnsupportedModelError if layers differ."""
        found = set(self.each(key, default))
        if len(found) != 1:
            raise UnsupportedModelError(
                f"'{self.keys.file}' has another {self.architecture}.{key} in each layer, which kvkeep does not read "
                f"for the architecture '{self.architecture}'."
            )
        return found.pop()

    def expect(self, key: str, value: Any, reason: str) -> None:
        """Read ``key``, which changes nothing while it has this value. Raises UnsupportedModelError, with the
        ``reason``, for another value."""
        stated = self.keys.get(f"{self.architecture}.{key}", type(value), value)
        if stated != value and not (isinstance(value, float) and math.isclose(stated, value, rel_tol=1e-6)):
            raise UnsupportedModelError(
                f"'{self.keys.file}' states {self.architecture}.{key} = {repr(stated)[:40]}, and kvkeep {reason}."
            )

    def has(self, *names: str) -> bool:
        """Return whether any layer has one of the tensors ``names`` (attn_q.bias)."""
        return any(f"blk.{layer}.{name}" in self.tensors for layer in range(self.layers) for name in names)

    def values(self, name: str) -> torch.Tensor:
        """Return the values of a tensor, float32. Raises ModelError if there is none of this name."""
        if name not in self.tensors:
            raise self.keys.damaged(f"it lacks {name}")
        return values(self.tensors[name])

    @property
    def layers(self) -> int:
        """The number of layers that compute an answer. Raises as :meth:`unused`."""
        drafting = self._drafting
        if not 0 <= drafting < self._blocks:
            raise self.keys.damaged(
                f"it states {str(drafting)[:20]} of its {self._blocks} layers for multi-token prediction"
            )
        return self._blocks - drafting

    @property
    def _drafting(self) -> int:
        return int(self.count("nextn_predict_layers", 0)) if self.architecture in DRAFTING else 0

    def unused(self, name: str) -> str | None:
        """Return why llama.cpp uses a tensor for no answer; None: it uses it. Raises ModelError unless the tensors are
        of as many layers as the file states."""
        match = _LAYER.match(name)
        if match is None:
            return None
        layer, layers = int(match[1]), self.layers
        if layer >= layers:
            return "a layer for multi-token prediction"
        return (
            "keys or values of a layer that uses those of an earlier one"
            if layer >= layers - self.sharing and _KEYS.search(name)
            else None
        )

    @property
    def sharing(self) -> int:
        """The number of last layers that use keys and values of earlier ones."""
        if self.architecture == "gemma3n":
            return max(0, self.layers - 20)  # llama.cpp does not read the file's number
        return self.count("attention.shared_kv_layers", 0) if self.architecture == "gemma4" else 0

    @cached_property
    def _blocks(self) -> int:
        stated = self.need("block_count")
        numbered = [match for name in self.tensors if (match := _LAYER.match(name))]
        there = 1 + max((int(match[1]) for match in numbered), default=-1)
        if not 0 < stated <= MAX_LAYERS or there not in (stated, stated - self._drafting):
            raise self.keys.damaged(f"it states {str(stated)[:20]} layers and has the tensors of {there}")
        return stated

    @property
    def width(self) -> int:
        """Elements of the residual stream. Raises ModelError unless the embedding has rows of as many."""
        stated, embedding = self.need("embedding_length"), self.tensors.get("token_embd.weight")
        if embedding is not None and embedding.shape[-1] != stated:
            raise self.keys.damaged(
                f"its embedding_length is {str(stated)[:20]}, and its embedding has rows of {embedding.shape[-1]}"
            )
        return stated

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding; 0 if there is none."""
        embedding = self.tensors.get("token_embd.weight")
        return 0 if embedding is None else embedding.shape[0]

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.same("attention.head_count")

    @property
    def head_dim(self) -> int:
        """Elements of a head. Raises ModelError for an absurd number, UnsupportedModelError if values are of another
        width."""
        stated = self.count("attention.key_length")
        if stated is None and (self.heads <= 0 or self.width % self.heads):
            raise self.keys.damaged(
                f"its attention.head_count is {self.heads}, which does not divide its embedding_length, {self.width}"
            )
        keys: int = self.width // self.heads if stated is None else stated
        if not 0 < keys <= MAX_HEAD_DIM:
            raise self.keys.damaged(f"its attention.key_length is {str(keys)[:20]}, not 1 to {MAX_HEAD_DIM}")
        self.expect("attention.value_length", keys, "reads only heads whose keys and values have one width")
        return keys


HARMLESS: Mapping[str, str] = {
    r"general\.(type|quantization_version|alignment|file_type)": "about the file; each tensor states its own format",
    r"general\.(name|author|version|organization|finetune|basename|description|quantized_by|size_label|url|doi|uuid)":
        "who made the model",
    r"general\.(repo_url|tags|languages|datasets|license(\.\w+)*|source\.\w+)": "who made the model, and its licence",
    r"general\.(base_model|dataset)\.(count|\d+\.\w+)": "what the model was made of",
    r"general\.sampling\.\w+": "recommended sampling; temp, top_k, top_p, min_p and penalty_repeat are taken",
    r"split\.(no|count|tensors\.count)": "the parts of a file; they are checked when they are joined",
    r"(quantize\.)?imatrix\.\w+": "how the file was quantised",
    r"ARCH\.rope\.scaling\.finetuned": "how the model was trained; Granite reads it",
    r"ARCH\.pooling_type": "embeddings of texts, which kvkeep does not compute",
    r"tokenizer\.ggml\.(fim_(pre|suf|mid|pad|rep|sep)|prefix|suffix|middle)_token_id":
        "marks of texts to be filled in, which a prompt names itself",
    r"tokenizer\.ggml\.(mask|seperator|cls)_token_id": "tokens of encoders",
    r"tokenizer\.ggml\.token_type_count": "segments of encoders",
    r"tokenizer\.ggml\.(scores|merges|pre|add_space_prefix|add_sep_token|remove_extra_whitespaces|precompiled_charsmap|normalizer\.\w+)":
        "a rule of another kind of tokenizer than the file's, which reads those of its own",
    r"tokenizer\.huggingface\.json": "the tokenizer once more; the other keys are read, as llama.cpp does",
}  # fmt: skip
"""Patterns of harmless keys, and the reason. ARCH stands for the architecture's name."""
OURS = ("general", "tokenizer", "split", "adapter", "clip", "diffusion", "xielu", "imatrix")
"""Names before the first point of keys that describe models. Other programs' notes have others, which nothing reads."""


def check_read(keys: FileKeys, architecture: str, prefixes: tuple[str, ...] = OURS) -> None:
    """Raise UnsupportedModelError for a key that was not read and that is not harmless. prefixes: names before the
    first point of the keys that are checked, besides the architecture's."""
    checked = (architecture, *prefixes)
    for key in keys.metadata:
        if key not in keys.read and key.split(".")[0] in checked and reason(key, architecture) is None:
            raise UnsupportedModelError(
                f"'{keys.file}' states {key[:80]} = {keys.shown(key)}, which kvkeep does not know in the architecture "
                f"'{architecture}'; without it the model would give other answers."
            )


def reason(key: str, architecture: str) -> str | None:
    """Return why ``key`` changes no answer; None if it may change some."""
    if key.split(".")[0] not in (architecture, *OURS):
        return "a note of another program"
    for pattern, why in HARMLESS.items():
        if re.fullmatch(pattern.replace("ARCH", re.escape(architecture)), key):
            return why
    return None
