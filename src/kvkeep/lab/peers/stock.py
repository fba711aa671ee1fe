"""The caches that come with transformers beside its default: allocated at once, moved to the host, kept in few bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache

from kvkeep.cache import held_by, stock_memory
from kvkeep.errors import UnsupportedModelError, UsageError, unknown
from kvkeep.lab.peers.base import Peer, installed
from kvkeep.policies.request import Exactness
from kvkeep.stores.meter import Memory, nbytes


class _Static(StaticCache):
    def memory(self) -> Memory:
        """Return the bytes allocated; nothing is copied at a step."""
        total = stock_memory(self).resident_bytes
        return Memory(total, peak_cache_bytes=total)


@dataclass(frozen=True)
class Static(Peer):
    """``StaticCache``, with room for prompt and answer from the beginning."""

    about: ClassVar[str] = "transformers' StaticCache, allocated for prompt and answer"

    def open(self, model: Any, budget: str | None, context: int) -> Cache:
        """Return an empty cache."""
        return _Static(config=model.config, max_cache_len=context)


class _Offloaded(DynamicCache):
    def memory(self) -> Memory:
        """Return the bytes by where they lie; one layer and the next are on the device while they are read."""
        device = next(layer.device for layer in self.layers if layer.is_initialized)
        there = sum(nbytes(*held_by(layer)) for layer in self.layers if layer.keys.device == device)
        all_of_it = stock_memory(self)
        host = all_of_it.resident_bytes - there
        places = {"device": 0, "host": host, "disk": 0}
        return Memory(there, 0, places, 0, there, 2 * all_of_it.peak_workspace_bytes)


@dataclass(frozen=True)
class Offloaded(Peer):
    """``DynamicCache(offloading=True)``: all layers but the one at work, and the next, lie in the host's memory."""

    about: ClassVar[str] = "transformers' DynamicCache(offloading=True), layers in the host's memory"
    needs: ClassVar[str] = "a CUDA device"

    def open(self, model: Any, budget: str | None, context: int) -> Cache:
        """Return an empty cache; raises UsageError on the CPU, which transformers' streams are not made for."""
        device = next(model.parameters()).device
        if device.type != "cuda":
            raise UsageError(
                f"transformers moves layers between a CUDA device and the host's memory, and this model is on the "
                f"{device.type}: 'stock-offloaded' has nothing to do there; 'stock' is the same cache without moving."
            )
        return _Offloaded(config=model.config, offloading=True)


class _Quantised(QuantizedCache):
    exactness = Exactness.LOSSY

    def memory(self) -> Memory:
        """Return the bytes of the codes with their scales, and of what is not in codes yet. Each step decodes a layer,
        whose entries are then in full for a moment."""
        recent = sum(nbytes(*held_by(layer)) for layer in self.layers)
        codes = sum(
            tensor.nbytes
            for layer in self.layers
            for tensor in _tensors((layer._quantized_keys, layer._quantized_values))
        )
        decoded = max(2 * layer._dequantize(layer._quantized_keys).nbytes for layer in self.layers)
        return Memory(recent, codes, peak_cache_bytes=recent + codes, peak_workspace_bytes=decoded)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors of backends' containers: tuples, tables, and tensors that are made of others."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


@dataclass(frozen=True)
class Quantised(Peer):
    """``QuantizedCache``: everything in few bits, of each layer the newest in full until there are 128 of them.

    bits: 2 or 4, with the backend hqq 1, 3 and 8 as well; or fp8, which needs no backend. backend: quanto or hqq, by
    default the one that is installed. Both group 64 neighbouring values, as transformers' defaults have it.
    """

    about: ClassVar[str] = "transformers' QuantizedCache: all entries in 2 or 4 bits, or fp8"
    needs: ClassVar[str] = "optimum-quanto or hqq, but for fp8"

    bits: str = "4"
    backend: str = ""

    @property
    def versions(self) -> dict[str, str]:
        """The backend's."""
        if self.bits == "fp8":
            return {}
        try:
            return installed(_PACKAGES[self._backend()][1])
        except UsageError:
            return {}

    def open(self, model: Any, budget: str | None, context: int) -> Cache:
        """Return an empty cache. Raises UnsupportedModelError for models with sliding windows, which transformers does
        not quantise."""
        try:
            if self.bits == "fp8":
                return _Quantised("fp8", model.config)
            if not self.bits.isdigit():
                raise UsageError(f"'stock-quantized' takes a number of bits or fp8, not '{self.bits}'.")
            backend = self._backend()
            axis = 1 if backend == "hqq" else 0  # along the entry, for either
            return _Quantised(backend, model.config, nbits=int(self.bits), axis_key=axis, axis_value=axis)
        except UsageError:
            raise
        except (ValueError, ImportError) as error:
            said = str(error).strip().splitlines()[0].rstrip(".")
            raise UnsupportedModelError(f"transformers' quantised cache cannot be made: {said}.") from error

    def _backend(self) -> str:
        names = (self.backend,) if self.backend else tuple(_PACKAGES)
        if names[0] not in _PACKAGES:
            raise unknown("backend of transformers' quantised cache", names[0], _PACKAGES)
        for name in names:
            if _found(_PACKAGES[name][0]):
                return name
        packages = " or ".join(_PACKAGES[name][1] for name in names)
        raise UsageError(
            f"'stock-quantized:{self.bits}' needs the package {packages}, which is missing: pip install "
            f"{_PACKAGES[names[0]][1]}, or take 'stock-quantized:fp8', which needs none."
        )


_PACKAGES = {"quanto": ("optimum.quanto", "optimum-quanto"), "hqq": ("hqq", "hqq")}
"""Backends: the module, and the name that pip knows."""


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even what it lies in
        return False
