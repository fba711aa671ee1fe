"""Products of 16-bit numbers with sums in float32, and torch's flash kernel for GPUs.

Attention weights are exponentials of scores, and bfloat16 has 8 bits of a score: rounding one of 20 changes its weight
by up to 6 %. So scores are float32 on every device. Whether a GPU has the operators for that depends on the GPU and on
torch's build. The first call on a device tries each of them on a small example, and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvkeep.errors import ran_out_of_memory

FLASH_DIMS = range(8, 257, 8)
"""Widths of keys and values that the flash kernel takes."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of matrices, (n, rows, columns) float32. a: (n, rows, k). b: (n, k, columns), same dtype."""
    a, b = operand(a), operand(b)
    return torch.bmm(a, b) if a.dtype == torch.float32 else torch.bmm(a, b, out_dtype=torch.float32)


def operand(tensor: Tensor) -> Tensor:
    """Return a tensor as :func:`product` multiplies it: in float32, unless the device multiplies 16 bits without
    rounding the sums."""
    if tensor.device.type != "cpu" and tensor.dtype != torch.float32 and _sums_float32(tensor.device, tensor.dtype):
        return tensor
    return tensor.float()


def flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float) -> tuple[Tensor, Tensor] | None:
    """Return attention without a mask by torch's flash kernel for GPUs, and the log-sum-exp of the scores, float32;
    None if the kernel does not take these tensors. Arguments and results as in
    :func:`kvkeep.step.torch.partial`; several heads of the query may share keys."""
    if query.device.type == "cpu" or query.dtype not in (torch.bfloat16, torch.float16):
        return None
    dim, groups = query.shape[-1], query.shape[1] // key.shape[1]
    if dim not in FLASH_DIMS or value.shape[-1] != dim or not all(_aligned(one) for one in (query, key, value)):
        return None
    if not _flash_works(query.device, query.dtype, dim, groups):
        return None
    output, lse, *_ = _flash(query, key, value, 0.0, causal, False, scale=scaling)
    return output.float(), lse


def _aligned(tensor: Tensor) -> bool:
    """Return whether rows can be read in units of 16 bytes, as the flash kernel reads them."""
    places = (tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and not any(place % 8 for place in places)


def _tried(trial: Callable[..., bool]) -> Callable[..., bool]:
    """Make an operator that a device does not have a trial that fails. A device is tried once."""

    def result(*given: object) -> bool:
        try:
            return trial(*given)
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            if ran_out_of_memory(error):
                raise
            return False

    return cache(result)


@_tried
def _sums_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products on the device can be float32: 2049 has more bits than bfloat16 and float16."""
    ones = torch.ones(1, 1, 2049, dtype=dtype, device=device)
    found = torch.bmm(ones, ones.transpose(1, 2), out_dtype=torch.float32)
    return found.dtype == torch.float32 and float(found) == 2049.0


@_tried
def _flash_works(device: torch.device, dtype: torch.dtype, dim: int, groups: int) -> bool:
    """Return whether the flash kernel gives what products give: for one query, for several, and for causal ones."""
    numbers = torch.arange(2 * 5 * dim, device=device).sin().to(dtype).view(1, 2, 5, dim)
    for queries, causal in ((1, False), (3, False), (5, True)):
        query = numbers[:, :, :queries].repeat_interleave(groups, 1).contiguous()
        output, lse, *_ = _flash(query, numbers, numbers, 0.0, causal, False, scale=0.3)
        spread = numbers.repeat_interleave(groups, 1).flatten(0, 1)
        scores = 0.3 * torch.bmm(query.flatten(0, 1).float(), spread.float().transpose(1, 2))
        if causal:
            scores += torch.full_like(scores, float("-inf")).triu(1)
        wanted = torch.bmm(scores.softmax(-1), spread.float()).view(output.shape)
        near = torch.allclose(output.float(), wanted, atol=0.01)
        if not (near and torch.allclose(lse, scores.logsumexp(-1).view(lse.shape), atol=0.001)):
            return False
    return True
