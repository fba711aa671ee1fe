"""The tensors of a GGUF file by the model's names. Each is read on demand.

Names and layouts are transformers' (``modeling_gguf_pytorch_utils``): the family's tensor processor reverts llama.cpp's
change to a tensor. If a processor only permutes rows, the rows of codes are permuted. Any other processor is applied to
the values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkeep.errors import ModelError
from kvkeep.extras import optional
from kvkeep.models.blocks import KINDS, Blocks
from kvkeep.models.matrices import matrices

DECODED_ELEMENTS = 1 << 24
"""Elements that are read and decoded at a time."""


@dataclass(frozen=True)
class Entry:
    """One tensor in the file."""

    name: str
    """The tensor's name in the file."""
    to: str
    """The tensor's name in the model."""
    kind: str
    """The kind of its blocks (Q4_1, F32)."""
    shape: tuple[int, ...]
    """The shape, rows first."""
    offset: int
    """Bytes before the tensor in the file."""
    size: int
    """Bytes of the tensor."""
    packs: bool
    """Whether the model can use its codes as they are."""


@dataclass(frozen=True)
class GgufTable:
    """The tensors of a file that the model has."""

    architecture: str
    """The architecture as named in the file."""
    entries: tuple[Entry, ...]

    def stored(self, file: Path, config: Any, keep: bool) -> dict[str, GgufTensor]:
        """Return the tensors of ``file`` by the model's names. config: the model's config. keep: matrices keep the
        file's bits where codes can hold them."""
        names = {one.name.removesuffix(".weight"): one.to for one in self.entries}
        family = _Family(_processor(self.architecture, config), names)
        parts: dict[str, list[Entry]] = {}
        for one in self.entries:
            parts.setdefault(one.to, []).append(one)
        return {to: GgufTensor(file, to, tuple(several), family, keep) for to, several in parts.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain lists and dicts."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> GgufTable:
        """Return the table from the result of :meth:`to_json`."""
        made = (Entry(**one | {"shape": tuple(one["shape"])}) for one in data["entries"])
        return GgufTable(data["architecture"], tuple(made))


def table(reader: Any, model: Any) -> GgufTable:
    """Return the tensors of a ``gguf.GGUFReader`` that ``model`` has. The model may be on torch's meta device."""
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    architecture = str(reader.fields["general.architecture"].contents())
    family = _Family(_processor(architecture, model.config))
    names = get_gguf_hf_weights_map(model, family.processor)
    places = {f"{name}.weight" for name in matrices(model)}
    found = []
    for tensor in reader.tensors:
        name = str(tensor.name)
        to = names.get(name) or names.get(name.removesuffix(".weight"))  # names of experts have no suffix
        if to is not None:
            shape = tuple(int(size) for size in reversed(tensor.shape))
            kind = str(tensor.tensor_type.name)
            packs = to in places and kind in KINDS and family.order(name, shape) is not None
            found.append(Entry(name, to, kind, shape, int(tensor.data_offset), int(tensor.n_bytes), packs))
    return GgufTable(architecture, tuple(found))


@dataclass(frozen=True)
class GgufTensor:
    """A tensor for transformers' loader, which reads it by ``[...]`` and ``to``."""

    file: Path
    to_name: str
    """The tensor's name in the model."""
    parts: tuple[Entry, ...]
    """The parts; several if the gates and ups of experts form one matrix."""
    family: _Family
    keep: bool
    """Whether a matrix keeps the file's bits."""

    def __getitem__(self, index: Any) -> GgufTensor:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor | GgufTensor:
        """Return the values in ``dtype``, or the tensor itself if it will be packed (:meth:`blocks`)."""
        return self if self.keep and self.parts[0].packs else self.dense().to(dtype)

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor in the file."""
        return torch.Size(self.parts[0].shape)

    def dense(self) -> Tensor:
        """Return the values in float32, as transformers gives them."""
        results: dict[str, dict[str, Tensor]] = {"tensors": {}}
        values: Any = None
        for part in self.parts:
            made = self.family.processor.process(
                weights=_values(self.file, part),
                name=part.name,
                tensor_key_mapping=self.family.names,
                parsed_parameters=results,
            )
            values = made.weights if made.name is not None else None
        if values is None:
            return results["tensors"][self.to_name]
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def blocks(self) -> Blocks:
        """Return the file's blocks, with rows in the model's order."""
        (part,) = self.parts
        data = np.fromfile(self.file, np.uint8, part.size, offset=part.offset)
        if len(data) != part.size:
            raise _cut_short(self.file, part)
        rows = torch.from_numpy(data).view(part.shape[0], -1)
        return Blocks(part.kind, rows)[self.family.order(part.name, part.shape)]


@dataclass(frozen=True)
class _Family:
    """The processing of tensors of one family by transformers."""

    processor: Any
    names: dict[str, str] = field(default_factory=dict)
    """The model's names by the file's, which have no suffix here."""
    orders: dict[tuple[str, tuple[int, ...]], Any] = field(default_factory=dict)
    """Orders that were found before, by name without the layer's number, and shape."""

    def order(self, name: str, shape: tuple[int, ...]) -> Any:
        """Return the order of the file's rows in the model; None if the processor does more than permute rows."""
        key = re.sub(r"\d+", "", name), shape
        if key not in self.orders:
            self.orders[key] = self._order(name, shape)
        return self.orders[key]

    def _order(self, name: str, shape: tuple[int, ...]) -> Any:
        """Run the processor on a matrix of row numbers."""
        numbers = np.broadcast_to(np.arange(shape[0], dtype=np.int32)[:, None], shape)
        others = {"tensor_key_mapping": self.names, "parsed_parameters": {"tensors": {}}}
        made = self.processor.process(weights=numbers, name=name, **others)
        if made.name is None or made.weights.shape != shape:
            return None
        if made.weights is numbers:
            return slice(None)
        order = made.weights[:, 0]
        moved = bool((made.weights == order[:, None]).all()) and np.array_equal(np.sort(order), np.arange(len(order)))
        return torch.from_numpy(np.ascontiguousarray(order)).long() if moved else None


def _processor(architecture: str, config: Any) -> Any:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())


def _values(file: Path, part: Entry) -> NDArray[Any]:
    """Return the dequantised values, in the file's order."""
    gguf = optional("gguf", "gguf")
    kind = gguf.GGMLQuantizationType[part.kind]
    made = [gguf.quants.dequantize(rows, kind) for rows in _rows(file, part)]
    return np.concatenate(made).reshape(part.shape)


def _rows(file: Path, part: Entry) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of all rows, some rows at a time: (rows, bytes of a row)."""
    count = math.prod(part.shape[:-1])
    width, step = part.size // count, max(1, DECODED_ELEMENTS // part.shape[-1])
    for first in range(0, count, step):
        taken = min(step, count - first)
        data = np.fromfile(file, np.uint8, taken * width, offset=part.offset + first * width)
        if len(data) != taken * width:
            raise _cut_short(file, part)
        yield data.reshape(taken, width)


def _cut_short(file: Path, part: Entry) -> ModelError:
    return ModelError(f"'{file}' is cut short: it ends within {part.name}; fetch it again.")
