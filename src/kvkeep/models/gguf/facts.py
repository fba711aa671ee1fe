"""What a file states about its architecture: keys without the architecture's name before them, and tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvkeep.errors import ModelError, UnsupportedModelError
from kvkeep.models.gguf.header import FileTensor
from kvkeep.models.gguf.keys import FileKeys
from kvkeep.models.gguf.values import values

MAX_LAYERS = 10_000
MAX_HEAD_DIM = MAX_EXPERTS = 65_536


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

    def text(self, key: str, default: str | None = None) -> Any:
        """Return a text; ``default`` if the file does not state it."""
        return self.keys.get(f"{self.architecture}.{key}", str, default)

    def need(self, key: str) -> int:
        """Return a whole number. Raises ModelError if the file does not state it."""
        found: int = self.keys.need(f"{self.architecture}.{key}", int)
        return found

    def each(self, key: str, default: int | None = None) -> list[int]:
        """Return a whole number for each layer. Raises ModelError if the file states none and there is no default."""
        if default is None and f"{self.architecture}.{key}" not in self.keys:
            self.need(key)
        return self.keys.several(f"{self.architecture}.{key}", self.layers, int, default)

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
        """Return the values of a tensor, float32."""
        return values(self.tensors[name])

    @cached_property
    def layers(self) -> int:
        """The number of layers. Raises ModelError unless the tensors are of as many."""
        stated = self.need("block_count")
        numbered = [match for name in self.tensors if (match := re.match(r"blk\.(\d+)\.", name))]
        there = 1 + max((int(match[1]) for match in numbered), default=-1)
        if not 0 < stated <= MAX_LAYERS or there != stated:
            raise ModelError(
                f"'{self.keys.file}' is damaged: it states {str(stated)[:20]} layers and has the tensors of {there}; "
                "fetch it again."
            )
        return stated

    @property
    def width(self) -> int:
        """Elements of the residual stream. Raises ModelError unless the embedding has rows of as many."""
        stated, embedding = self.need("embedding_length"), self.tensors.get("token_embd.weight")
        if embedding is not None and embedding.shape[-1] != stated:
            raise ModelError(
                f"'{self.keys.file}' is damaged: its embedding_length is {str(stated)[:20]}, and its embedding "
                f"has rows of {embedding.shape[-1]}; fetch it again."
            )
        return stated

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
            raise ModelError(
                f"'{self.keys.file}' is damaged: its attention.head_count is {self.heads}, which does not divide its "
                f"embedding_length, {self.width}."
            )
        keys: int = self.width // self.heads if stated is None else stated
        if not 0 < keys <= MAX_HEAD_DIM:
            raise ModelError(
                f"'{self.keys.file}' is damaged: its attention.key_length is {str(keys)[:20]}, not 1 to {MAX_HEAD_DIM}."
            )
        self.expect("attention.value_length", keys, "reads only heads whose keys and values have one width")
        return keys
