"""transformers' caches other than its default: allocated in advance, moved to the host, or quantised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache
from transformers.utils import is_optimum_quanto_available

from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.memory.meter import Memory
from kvkeep.stock import account
from kvkeep.stores.dynamic import holding_of
from kvkeep_lab.peers.base import Peer, installed


class _Static(StaticCache):
    def memory(self) -> Memory:
        """Return the allocated bytes. A step copies no entries."""
        total = account(self).resident_bytes
        return Memory(total, peak_cache_bytes=total)


@dataclass(frozen=True)
class Static(Peer):
    """``StaticCache``, allocated for prompt and answer at the start."""

    about: ClassVar[str] = "transformers' StaticCache, allocated for prompt and answer"

    def open(self, model: Any, budget: str | None, context: int) -> Cache:
        return _Static(config=model.config, max_cache_len=context)


class _Offloaded(DynamicCache):
    def memory(self) -> Memory:
        """Return the bytes by place. During a step, the current and the next layer are on the device."""
        device = next(layer.device for layer in self.layers if layer.is_initialized)
        there = sum(holding_of(layer).resident_bytes for layer in self.layers if layer.keys.device == device)
        all_of_it = account(self)
        host = all_of_it.resident_bytes - there
        places = {"device": 0, "host": host, "disk": 0}
        return Memory(there, 0, places, 0, there, 2 * all_of_it.peak_workspace_bytes)


@dataclass(frozen=True)
class Offloaded(Peer):
    """``DynamicCache(offloading=True)``: all layers except the current and the next are in the host's memory."""

    about: ClassVar[str] = "transformers' DynamicCache(offloading=True), layers in the host's memory"
    needs: ClassVar[str] = "a CUDA device"

    def open(self, model: Any, budget: str | None, context: int) -> Cache:
        """Return an empty cache. Raises UsageError on the CPU, because transformers moves layers by CUDA streams."""
        device = next(model.parameters()).device
        if device.type != "cuda":
            raise UsageError(
                "transformers moves layers between a CUDA device and the host's memory, and this model is on the "
                f"{device.type}: 'stock-offloaded' has no effect there; use 'stock'."
            )
        return _Offloaded(config=model.config, offloading=True)


class _Quantised(QuantizedCache):
    exactness = Exactness.LOSSY

    def memory(self) -> Memory:
        recent = sum(holding_of(layer).resident_bytes for layer in self.layers)
        codes = sum(
            tensor.nbytes
            for layer in self.layers
            for tensor in _tensors((layer._quantized_keys, layer._quantized_values))
        )
        decoded = max(2 * layer._dequantize(layer._quantized_keys).nbytes for layer in self.layers)
        return Memory(recent, codes, peak_cache_bytes=recent + codes, peak_workspace_bytes=decoded)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors in a backend's containers: tuples, lists, dicts, and tensors composed of others."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


@dataclass(frozen=True)
class StockQuantised(Peer):
    """``QuantizedCache``: quantised entries, and up to 128 of the newest entries of each layer in full precision."""

    about: ClassVar[str] = "transformers' QuantizedCache: all entries in 2 or 4 bits, or fp8"
    needs: ClassVar[str] = "optimum-quanto, but for fp8"

    bits: str = "4"
    """2 or 4: bits of quanto's codes, with a scale per 64 neighbouring values (transformers' defaults). fp8: no extra
    package, with a scale per layer."""

    @property
    def versions(self) -> dict[str, str]:
        return {} if self.bits == "fp8" else installed("optimum-quanto")

    def open(self, model: Any, budget: str | None, context: int) -> Cache:
        """Return an empty cache. Raises UsageError for other bits or without quanto, UnsupportedModelError for models
        with sliding windows, which transformers does not quantise."""
        if self.bits not in ("2", "4", "fp8"):
            raise UsageError(f"'stock-quantized' takes 2 or 4 bits, or fp8, not '{self.bits}'.")
        if self.bits != "fp8" and not is_optimum_quanto_available():
            raise UsageError(
                f"'stock-quantized:{self.bits}' needs the package optimum-quanto, which is missing: pip install "
                "optimum-quanto, or take 'stock-quantized:fp8', which needs none."
            )
        try:
            if self.bits == "fp8":
                return _Quantised("fp8", model.config)
            return _Quantised("quanto", model.config, nbits=int(self.bits))
        except ValueError as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise UnsupportedModelError(f"transformers cannot quantise this cache: {reason}.") from error
