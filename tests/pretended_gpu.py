"""A pretended GPU: tensors that say they are on "cuda:0", with numbers that the CPU computes. It refuses what a GPU
refuses, and counts what the host waits for.

    with PretendedGpu() as gpu:
        model = on_gpu(model)                 # torch.device("cuda") works, too
        gpu.clear()
        model(ids.to("cuda"), cache=cache)
    gpu.waits, gpu.copies, gpu.copied_bytes, gpu.kernels

It refuses, with an error that begins with "GPU:", tensors of the host among those of the device, generators of the CPU,
and operators without a kernel for GPUs.

It does not show the rounding of a GPU's kernels, races between streams, and limits of memory.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import kvkeep

aten = torch.ops.aten
GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
SOURCES = str(Path(kvkeep.__file__).parent)
READS = {"_local_scalar_dense", "is_nonzero", "equal", "allclose"}
"""Operators whose result is a number of Python."""
SIZED_BY_NUMBERS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
"""Operators whose result has a shape that depends on numbers."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
TAKE_SCALARS = INDEXED | {"masked_fill", "masked_fill_", "fill", "fill_", "full_like", "lift_fresh"}
"""Operators that accept a host tensor without dimensions, beside those that torch marks as pointwise."""
MADE_WITHOUT_NUMBERS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NO_KERNEL = {"_scaled_dot_product_flash_attention_for_cpu"}


class Refused(RuntimeError):
    """What a GPU would refuse."""

    def __init__(self, message: str) -> None:
        super().__init__(f"GPU: {message}")


class GpuTensor(Tensor):
    """A tensor on the pretended GPU."""

    inner: Tensor
    """Its numbers, on the CPU."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta",  # the CPU build of torch has no tensors with the device "cuda"
        )  # fmt: skip
        made.inner = inner
        return made

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _running().run(func, args, kwargs or {})

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"GpuTensor({self.inner!r})"

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_with_lists_on_the_host(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_with_lists_on_the_host(key), value)

    def tolist(self) -> Any:
        _running().waited("tolist")
        return self.inner.tolist()

    def numpy(self, **options: Any) -> Any:  # type: ignore[override]
        raise Refused("can't convert a device tensor to numpy")

    def is_pinned(self, *device: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:  # memory is not used again here
        pass

    def data_ptr(self) -> int:  # an identity: the native library refuses tensors of a device
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def new_tensor(self, data: Any, **options: Any) -> Any:
        return torch.tensor(data, **({"dtype": self.dtype, "device": GPU} | options))


class PretendedGpu:
    """Within the block, "cuda" is a pretended device, in all threads that begin there."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        """How often the host waits for the device: "what at file:line" of kvkeep's caller."""
        self.copies: Counter[str] = Counter()
        """Copies between host and device: "to host, pinned", "to device, pageable", ..."""
        self.copied_bytes: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        """Operators that run on the device, without views."""
        self._pinned: dict[int, Any] = {}
        """Storages of pinned memory, which are kept so that their addresses stay theirs."""
        self._patches, self._mode = pytest.MonkeyPatch(), _Mode(self)

    def clear(self) -> None:
        """Forget what was counted."""
        for counted in (self.waits, self.copies, self.copied_bytes, self.kernels):
            counted.clear()

    def __enter__(self) -> Self:
        assert not _ENTERED, "one pretended GPU at a time"
        _ENTERED.append(self)
        replace = self._patches.setattr
        for name, answer in _CUDA.items():
            replace(torch.cuda, name, answer, raising=False)
        replace(torch.cuda, "synchronize", lambda device=None: self.waited("synchronize"))
        replace(torch.cuda, "Stream", _Stream)
        replace(torch.cuda, "Event", _Event)
        replace(torch.cuda, "current_stream", lambda device=None: _Stream.current)
        replace(torch.cuda, "default_stream", lambda device=None: _Stream.default)
        replace(torch.cuda, "stream", _StreamBlock)
        move = Tensor.to
        replace(Tensor, "to", lambda one, *args, **options: move(one, *map(_indexed, args), **_indexed_in(options)))
        for name in ("tensor", "as_tensor"):  # which make a tensor before a mode sees an operator
            replace(torch, name, self._maker(getattr(torch, name)))
        begin = threading.Thread.run

        def run(thread: threading.Thread) -> None:
            with _Mode(self):  # modes belong to a thread
                begin(thread)

        replace(threading.Thread, "run", run)
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._patches.undo()
        _ENTERED.remove(self)

    def waited(self, what: str) -> None:
        """Count that the host waits for the device."""
        self.waits[f"{what} at {_caller()}"] += 1

    def _maker(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
            if isinstance(data, GpuTensor):
                return data if device is None or _is_gpu(device) else data.to(device)
            found = make(data, *args, **options)
            return found.to(GPU) if device is not None and _is_gpu(device) else found

        return made

    # -- operators ------------------------------------------------------------------------------------------

    def run(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Run an operator, on the device if a tensor or the option ``device`` is there."""
        name, is_view = _facts(func)
        asked = options.get("device")
        given: list[Tensor] = []
        _mapped(given.append, [*args, *options.values()])
        own = {id(one.inner): one for one in given if isinstance(one, GpuTensor)}
        target = bool(own) if asked is None else _is_gpu(asked)
        if (
            name == "_to_copy"
            and own
            and asked is not None
            and target
            and options.get("dtype") in (None, args[0].dtype)
        ):
            return args[0]  # torch compares devices of its own, and takes the tensor for one elsewhere
        if name == "is_pinned":
            return args[0].untyped_storage().data_ptr() in self._pinned
        if name in ("copy_", "_to_copy") and (own or target):
            target = self._check_copy(name, args, options, target)
        elif own:
            self._check(func, name, args, options, given)
            target = target and name not in READS
        plain = {key: _mapped(_inner, value) for key, value in options.items() if key not in ("device", "pin_memory")}
        if asked is not None:
            plain["device"] = HOST
        result = KERNELS.get(func, func)(*_mapped(_inner, args), **plain)
        if options.get("pin_memory") or name == "_pin_memory":
            self._pin(result)
        if not target:
            return result
        if name not in MADE_WITHOUT_NUMBERS and not is_view:
            self.kernels[name] += 1
        return _mapped(lambda one: own[id(one)] if id(one) in own else GpuTensor(one), result)

    def _check(self, func: Any, name: str, args: Any, options: dict[str, Any], given: list[Any]) -> None:
        """Refuse what a GPU refuses, and count what the host waits for."""
        if name in NO_KERNEL:
            raise Refused(f"{func} has no kernel")
        if isinstance(options.get("generator"), torch.Generator):
            raise Refused(f"{func} expects a generator of the device")
        if name in INDEXED:
            self._check_index(func, args)
            given = [args[0], *args[2:3]]
        host = [one for one in given if isinstance(one, Tensor) and not isinstance(one, GpuTensor)]
        if any(one.dim() for one in host):
            raise Refused(f"{func} found tensors of the host among those of the device")
        if host and torch.Tag.pointwise not in func.tags and name not in TAKE_SCALARS:
            raise Refused(f"{func} takes no number of a host tensor")
        if name in READS | SIZED_BY_NUMBERS or (name == "repeat_interleave" and options.get("output_size") is None):
            self.waited(name)

    def _check_index(self, func: Any, args: Any) -> None:
        places = [one for one in args[1] if one is not None]
        if not isinstance(args[0], GpuTensor):
            raise Refused(f"{func} found places of the device for a tensor of the host")
        for one in places:
            if not isinstance(one, GpuTensor):
                self._copied(one, True, "pageable")
                self.waited("index of the host")
            elif one.dtype == torch.bool and not (len(args) > 2 and args[2].dim() == 0):  # else it is filled
                self.waited("index of bools")

    def _check_copy(self, name: str, args: Any, options: dict[str, Any], target: bool) -> bool:
        """Count a copy between host and device. Returns whether its result is on the device."""
        source, to = (args[1], isinstance(args[0], GpuTensor)) if name == "copy_" else (args[0], target)
        if isinstance(source, GpuTensor) == to:
            return to
        direct = options.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        host = source if to else args[0] if name == "copy_" else None
        if host is None:  # torch makes it
            how = "pinned" if direct else "pageable"
            options["pin_memory"] = direct
        elif host.untyped_storage().data_ptr() not in self._pinned:
            how = "pageable"
        else:
            plain = host.is_contiguous() and args[0].dtype == source.dtype
            how = "pinned" if plain or (name == "_to_copy" and host.is_contiguous()) else "pinned by pageable"
        self._copied(source, to, how)
        if not direct or how != "pinned":
            self.waited(f"copy to {'device' if to else 'host'}")
        return to

    def _copied(self, source: Tensor, to: bool, how: str) -> None:
        kind = f"to {'device' if to else 'host'}, {how}"
        self.copies[kind] += 1
        self.copied_bytes[kind] += source.numel() * source.element_size()

    def _pin(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage


class _Mode(TorchDispatchMode):
    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.gpu.run(func, args, dict(kwargs or {}))


_ENTERED: list[PretendedGpu] = []


def _running() -> PretendedGpu:
    assert _ENTERED, "a tensor of a pretended GPU is used after its block"
    return _ENTERED[-1]


def _is_gpu(device: Any) -> bool:
    return torch.device(device).type in ("cuda", "meta")  # torch's own code takes a GpuTensor for one on "meta"


def _indexed(value: Any) -> Any:
    """Return "cuda:0" for "cuda". torch asks its own code for the index, which the CPU build does not have."""
    return GPU if value == "cuda" or value == torch.device("cuda") else value


def _indexed_in(options: dict[str, Any]) -> dict[str, Any]:
    return {key: _indexed(value) for key, value in options.items()}


@cache
def _facts(func: Any) -> tuple[str, bool]:
    """Return the name of an operator, and whether its result is a view."""
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    return func._schema.name.removeprefix("aten::"), is_view


def _mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return ``value`` with its tensors changed. (torch's tree_map takes as long as everything else here.)"""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)([_mapped(change, one) for one in value]) if type(value) in (list, tuple) else value


def _inner(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, GpuTensor) else tensor


def _caller() -> str:
    """Return the place in kvkeep, or the one in another package, that runs the operator."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename[len(SOURCES) + 1 :]}:{frame.f_lineno}" if frame is not None else "elsewhere"


def _with_lists_on_the_host(key: Any) -> Any:
    """Make tensors of lists in an index. torch would make them on the device without an operator."""
    if isinstance(key, list):
        return torch.tensor(key)
    return tuple(map(_with_lists_on_the_host, key)) if isinstance(key, tuple) else key


# -- torch.cuda ---------------------------------------------------------------------------------------------


class _Stream:
    """A stream. Everything is complete at once."""

    current: _Stream
    default: _Stream

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = GPU

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def wait_event(self, event: _Event) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _running().waited("synchronize")


_Stream.current = _Stream.default = _Stream()


class _StreamBlock:
    """``with torch.cuda.stream(stream):``."""

    def __init__(self, stream: _Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before, _Stream.current = _Stream.current, self.stream or _Stream.current

    def __exit__(self, *error: Any) -> None:
        _Stream.current = self.before


class _Event:
    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.time = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self.time = time.perf_counter()

    def wait(self, stream: _Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _running().waited("synchronize")

    def elapsed_time(self, end: _Event) -> float:
        return 1000 * (end.time - self.time)


_CUDA: dict[str, Any] = {  # but not is_initialized: there is no driver for kernels of a GPU, so none are chosen
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda device=None: "a pretended GPU",
    "get_device_capability": lambda device=None: (9, 0),
    "mem_get_info": lambda device=None: (2**36, 2**36),
}


def _histc(values: Tensor, bins: int = 100, *ends: Any, **options: Any) -> Tensor:
    """A GPU counts integers, too."""
    return torch.histc(values.float(), bins, *ends, **options).to(values.dtype)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False, *, scale: float
) -> tuple[Any, ...]:
    """torch's flash kernel, with its requirements: sums in float32, weights and results in the dtype of the values."""
    heads, dim, shared = query.shape[1], query.shape[3], key.shape[1]
    if query.dtype not in (torch.bfloat16, torch.float16) or {key.dtype, value.dtype} != {query.dtype}:
        raise Refused("the flash kernel takes bfloat16 or float16")
    if dim % 8 or dim > 256 or {key.shape[3], value.shape[3]} != {dim} or heads % shared:
        raise Refused("the flash kernel takes equal heads of 8, 16, ... 256 numbers")
    if any(one.stride(3) != 1 or one.data_ptr() % 16 for one in (query, key, value)):
        raise Refused("the flash kernel reads rows in units of 16 bytes")
    key, value = (one.repeat_interleave(heads // shared, 1) for one in (key, value))
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if causal:
        scores += torch.full_like(scores, float("-inf")).triu(1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(value.dtype)
    nothing = lse.new_empty(0)
    output = (weights.float() @ value.float()).to(value.dtype)
    return output, lse, nothing, nothing, query.shape[2], key.shape[2], nothing, nothing, nothing


KERNELS: dict[Any, Callable[..., Any]] = {
    aten.histc.default: _histc,
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._pin_memory.default: lambda tensor, device=None: tensor.clone(),
    aten.bmm.dtype: lambda a, b, out: torch.bmm(a.to(out), b.to(out)),
    aten.baddbmm.dtype: lambda c, a, b, out, **options: torch.baddbmm(c, a.to(out), b.to(out), **options),
}
"""Operators that only GPUs have, or that do more there."""


def on_gpu(model: nn.Module) -> nn.Module:
    """Put the parameters and buffers of ``model`` on the pretended GPU, without gradients and without copies."""
    for module in model.modules():
        for name, one in list(module._parameters.items()):
            if one is not None and not isinstance(one.data, GpuTensor):
                module._parameters[name] = nn.Parameter(GpuTensor(one.detach()), requires_grad=False)
        for name, one in list(module._buffers.items()):
            if one is not None and not isinstance(one, GpuTensor):
                module._buffers[name] = GpuTensor(one.detach())
    return model
