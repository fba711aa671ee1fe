"""Which executor has kernels for the tensors of a device: the only place that decides."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from kvkeep.step import native


def kernels_of(device: torch.device) -> ModuleType:
    """Return the executor of a device: :mod:`kvkeep.step.triton` on a GPU where triton is installed, else the native
    library's. Its functions ``can_attend`` and ``can_join`` say which tensors it reads; :mod:`kvkeep.step.torch` reads
    all others. It has ``CollectedAttention``, ``attend_all``, ``in_order``, ``run``, ``supports_dims`` and
    ``wrote``."""
    # A device that only pretends to be a GPU has started no driver.
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return native
    return _for_gpu()


@cache
def _for_gpu() -> ModuleType:
    if find_spec("triton") is None:
        return native
    from kvkeep.step import triton  # compiles for the GPU, and needs a second to import

    return triton
