"""The weights of a GGUF file by the model's names. Each is read on demand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedModelError
from kvkeep.models.experts import experts_of
from kvkeep.models.gguf.architectures import ARCHITECTURES, AS_STORED, Architecture, Change
from kvkeep.models.gguf.facts import Facts
from kvkeep.models.gguf.header import FileTensor, stored_bytes, values
from kvkeep.models.gguf.rope import FACTORS, LONG, SHORT
from kvkeep.models.matrices import matrices
from kvkeep.models.packed import KINDS, Blocks

_NAME = re.compile(r"(?:blk\.(\d+)\.)?([\w.]+?)(\.weight|\.bias)?")
_NORM = re.compile(r"(attn|ffn|output|post_ffw|post_attention|attn_q|attn_k)_norm\.weight")


@dataclass(frozen=True)
class GgufTensor:
    """A weight of the model, in a file."""

    to: str
    """Its name in the model."""
    parts: tuple[FileTensor, ...]
    """The file's tensors; several if the gates and ups of experts form one matrix."""
    change: Change
    packs: bool
    """Whether the model can use the file's blocks as they are, but for the order of rows."""

    def dense(self) -> Tensor:
        """Return the values in float32, as the model holds them."""
        return self.change.values([values(part) for part in self.parts])

    def blocks(self) -> list[Blocks]:
        """Return the file's blocks of each part, with rows in the model's order."""
        return [self._blocks(part) for part in self.parts]

    def _blocks(self, part: FileTensor) -> Blocks:
        count = torch.Size(part.shape[:-1]).numel()  # of experts: the rows of all
        blocks = Blocks(part.kind, torch.from_numpy(stored_bytes(part, 0, part.size)).view(count, -1))
        if self.change is AS_STORED or self.change.order is None:
            return blocks
        return replace(blocks[self.change.order(count)], columns=self.change.columns)


def packing_places(model: Any) -> set[str]:
    """Return the names of the matrices of a model that may keep their blocks, those of experts among them."""
    places = {f"{name}.weight" for name in matrices(model)}
    return places | {f"{name}.{one}" for name, experts in experts_of(model).items() for one in experts.form.matrices}


def tensors_of(facts: Facts, places: set[str]) -> dict[str, GgufTensor]:
    """Return the weights of a file by the model's names. places: the names of matrices that may keep their blocks.
    Raises UnsupportedModelError for a tensor without a name in the model, or too many or too few for a weight."""
    architecture = ARCHITECTURES[facts.architecture]
    changes: dict[tuple[str, str], tuple[Change, ...]] = {}  # those of an architecture read facts
    found: dict[str, list[FileTensor]] = {}
    changed: dict[str, Change] = {}
    for tensor in facts.tensors.values():
        if tensor.name in CONFIGURING or facts.unused(tensor.name):
            continue
        weights, stem, suffix = _names(tensor.name, architecture)
        if not weights:
            raise UnsupportedModelError(
                f"'{facts.keys.file}' has the tensor {tensor.name[:80]}, which kvkeep does not know in the "
                f"architecture '{facts.architecture}'; without it the model would give other answers."
            )
        if (stem, suffix) not in changes:
            changes[stem, suffix] = _changes(facts, architecture, stem, suffix)
        for weight, change in zip(weights, changes[stem, suffix], strict=True):
            found.setdefault(weight, []).append(tensor)
            changed[weight] = change
    made = {}
    for to, parts in found.items():
        if len(parts) != changed[to].parts:
            names = ", ".join(part.name for part in parts)
            raise UnsupportedModelError(
                f"'{facts.keys.file}' has {len(parts)} tensors for the weight {to} ({names}); the architecture "
                f"'{facts.architecture}' makes it of {changed[to].parts}."
            )
        if len(parts) > 1:
            order = [*architecture.layer]
            parts.sort(key=lambda part: order.index(part.name.split(".", 2)[2]))
        kinds, change = {part.kind for part in parts}, changed[to]
        stays = change.order is not None or (change.kept and (len(kinds) == 1 or len(parts[0].shape) == 3))
        packs = to in places and kinds <= {*KINDS} and stays
        made[to] = GgufTensor(to, tuple(parts), change, packs)
    return made


CONFIGURING: Mapping[str, str] = dict.fromkeys((FACTORS, LONG, SHORT), "config: rope_parameters")
"""Tensors that are no weight of the model, and what they become."""


def _names(name: str, architecture: Architecture) -> tuple[tuple[str, ...], str, str]:
    """Return the model's names of what a file's tensor holds (none: the model has nothing of it), its name in a layer,
    and its suffix."""
    match = _NAME.fullmatch(name)
    if match is None:
        return (), name, ""
    layer, stem, suffix = match[1], match[2], match[3] or ""
    names, prefix = (architecture.top, "") if layer is None else (architecture.layer, f"{architecture.prefix}{layer}.")
    if (complete := names.get(stem + suffix)) is not None:
        several = (complete,) if isinstance(complete, str) else complete
        return tuple(prefix + one for one in several), stem, suffix
    return ((f"{prefix}{names[stem]}{suffix}",) if stem in names and suffix else ()), stem, suffix


def _changes(facts: Facts, architecture: Architecture, stem: str, suffix: str) -> tuple[Change, ...]:
    made = architecture.changes.get(stem + suffix) or architecture.changes.get(stem)
    if made is None:
        return (architecture.norms if _NORM.fullmatch(stem + suffix) else AS_STORED,)
    changes = made if isinstance(made, Change) else made(facts)
    return (changes,) if isinstance(changes, Change) else changes
