"""What a pass asks of the device, operator by operator: two passes with the same operators, numbers and memory can be
replaced by a graph of CUDA."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_COPIES = ("aten::_to_copy", "aten::copy_")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")
_READS = ("aten::is_nonzero", "aten::_local_scalar_dense", "aten::equal", "aten::allclose")


class Operators(TorchDispatchMode):
    """Notes the operators of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []
        """Each operator with its numbers, and the shapes and places of its tensors. The place of a tensor that was
        there before is its address; of any other one, which of the new tensors it is."""
        self.waits = ""
        """The first operator for which the host waits, or that copies from the host; empty: there is none."""
        self._made: dict[int, int] = {}  # by address, the number of a new tensor
        self._numbers = itertools.count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*_leaves((args, [*kwargs.values()]))]
        tensors = [one for one in given if isinstance(one, Tensor)]
        self.notes.append([func, *kwargs, *(self._note(one) for one in given)])
        result = func(*args, **kwargs)
        results = [one for one in _leaves(result) if isinstance(one, Tensor)]
        known = {_address(one) for one in tensors}
        self._made |= {_address(one): next(self._numbers) for one in results if _address(one) not in known}
        if not self.waits and _waits(func, args, [*tensors, *results]):
            self.waits = str(func)
        return result

    def _note(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "cpu" and not value.dim():
            return value.item()
        place = self._made.get(_address(value))
        return value.data_ptr() if place is None else (place, value.storage_offset()), value.shape, value.stride()


def _waits(func: Any, args: Any, tensors: list[Tensor]) -> bool:
    """Return whether the host waits for an operator of a device, or copies to or from it. tensors: those that it takes
    and returns."""
    name, host = func._schema.name, [one for one in tensors if one.device.type == "cpu"]
    if len(host) == len(tensors):
        return False
    if name in _INDEXED:
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]) or bool(host)
    if name in _READS or torch.Tag.dynamic_output_shape in func.tags:
        return True
    return any(one.dim() for one in host) or (name in _COPIES and bool(host))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value
