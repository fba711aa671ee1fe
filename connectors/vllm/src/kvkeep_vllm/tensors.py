"""The bytes of blocks in the tensors of vLLM's cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvkeep.errors import UsageError


class BlockTensors:
    """The tensors of vLLM's cache, read and written by block. A block is the bytes of all layers in the order of their
    names.

    caches: the tensor of each layer, (blocks, ...) on the CPU; a tensor that several layers share counts once.
    Raises UsageError for tensors whose blocks are not each in one piece.
    """

    def __init__(self, caches: Mapping[str, Tensor]) -> None:
        names = {tensor.data_ptr(): name for name, tensor in sorted(caches.items(), reverse=True)}
        self.names: list[str] = sorted(names.values())
        """Layers, sorted."""
        self.layers: list[Tensor] = [caches[name] for name in self.names]
        """Their tensors."""
        self._views = [_blocks(tensor) for tensor in self.layers]
        self.sizes: list[int] = [view.shape[1] for view in self._views]
        """Bytes of a block in each layer."""
        self.nbytes: int = sum(self.sizes)
        """Bytes of a block."""

    def read(self, block: int) -> Tensor:
        """Return a copy of a block: (nbytes,) uint8."""
        return torch.from_numpy(np.concatenate([view[block] for view in self._views]))

    def write(self, block: int, raw: Tensor) -> None:
        """Replace a block by ``raw``, (nbytes,) uint8."""
        rows, start = raw.numpy(), 0
        for view, size in zip(self._views, self.sizes, strict=True):
            view[block] = rows[start : start + size]
            start += size


def _blocks(tensor: Tensor) -> np.ndarray:
    """Return a tensor as (blocks, bytes), uint8, without a copy."""
    if tensor.device.type != "cpu":
        raise UsageError(f"KeepConnector needs vLLM's cache on the CPU; this one is on '{tensor.device}'.")
    try:
        return tensor.view(torch.uint8).view(len(tensor), -1).numpy()
    except RuntimeError as error:
        raise UsageError(
            f"KeepConnector needs each block in one piece of memory; this cache has shape {tuple(tensor.shape)} "
            f"and strides {tensor.stride()}."
        ) from error
