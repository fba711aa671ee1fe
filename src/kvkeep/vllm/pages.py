"""The bytes of blocks in the tensors of vLLM's cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvkeep.errors import UsageError


class Pages:
    """Blocks of a cache, each the bytes of all layers, in the order of their names. caches: the tensor of each layer,
    (blocks, ...) on the CPU; layers that share one count once.

    names: of the layers; tensors: theirs; sizes: bytes of a block in each; nbytes: their sum.
    Raises UsageError for tensors whose blocks are not each in one piece.
    """

    def __init__(self, caches: Mapping[str, Tensor]) -> None:
        own = {tensor.data_ptr(): name for name, tensor in sorted(caches.items(), reverse=True)}
        self.names = sorted(own.values())
        self.tensors = [caches[name] for name in self.names]
        self._views = [_blocks(tensor) for tensor in self.tensors]
        self.sizes = [view.shape[1] for view in self._views]
        self.nbytes = sum(self.sizes)

    def read(self, block: int) -> np.ndarray:
        """Return a copy of a block: (nbytes,) uint8."""
        return np.concatenate([view[block] for view in self._views])

    def write(self, block: int, raw: np.ndarray) -> None:
        """Replace a block by ``raw``, (nbytes,) uint8."""
        start = 0
        for view, size in zip(self._views, self.sizes, strict=True):
            view[block] = raw[start : start + size]
            start += size


def _blocks(tensor: Tensor) -> np.ndarray:
    """Return a tensor as (blocks, bytes), uint8, without a copy."""
    if tensor.device.type != "cpu":
        raise UsageError(f"KeepConnector keeps blocks of vLLM on the CPU, and these are on '{tensor.device}'.")
    try:
        return tensor.view(torch.uint8).view(len(tensor), -1).numpy()
    except RuntimeError as error:
        raise UsageError(
            f"KeepConnector takes a cache whose blocks are each in one piece, and this one is "
            f"{tuple(tensor.shape)} in steps of {tensor.stride()}."
        ) from error
