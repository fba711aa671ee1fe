"""KV-Direct's Table 2: keys and values rebuilt from residuals, against the cached ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import Adapter
from kvkeep.models.binding import bind
from kvkeep.models.forward import attending, probing

SINGLE_ROWS = 16
"""Tokens, spread evenly over the text, that are also rebuilt one by one."""


@dataclass(frozen=True)
class Difference:
    """Largest absolute difference of rebuilt and cached keys, and of values."""

    keys: float = 0.0
    values: float = 0.0

    def __or__(self, other: Difference) -> Difference:
        """Return the larger of both."""
        return Difference(max(self.keys, other.keys), max(self.values, other.values))

    @property
    def none(self) -> bool:
        """Whether not a bit differs."""
        return self.keys == 0 and self.values == 0


@dataclass(frozen=True)
class LayerDifference:
    """One layer's. same: all rows at once, the shapes of the forward pass. pages: a third of the rows at a time.
    rows: single tokens. Sums may run in another order where the shapes are others."""

    layer: int
    same: Difference
    pages: Difference
    rows: Difference


@dataclass(frozen=True)
class Reconstruction:
    """The largest of all layers of one ``kind`` ("full", "sliding"), in one dtype and at one length."""

    dtype: str
    length: int
    kind: str
    same: Difference
    pages: Difference
    rows: Difference
    layers: tuple[LayerDifference, ...]

    @property
    def holds(self) -> bool:
        """With the same shapes, not a bit differs; other shapes are reported, nothing is claimed of them."""
        return self.same.none


@torch.no_grad()
def reconstruction(
    model: Any,
    ids: Tensor,
    lengths: Sequence[int],
    dtype: torch.dtype,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Reconstruction]:
    """Rebuild keys and values from the residuals of a forward pass in ``dtype``, for each length.

    In another dtype than the model's a copy is cast, and dropped afterwards. Keys of sliding layers are compared at
    all positions, the windowed cache's own in :func:`kvkeep_lab.windows.beyond_the_window`.
    """
    bind(model)
    cast = model if next(model.parameters()).dtype == dtype else copy.deepcopy(model).to(dtype)
    adapter = Adapter(cast)
    geometry = ModelGeometry.from_config(model.config)
    name = str(dtype).removeprefix("torch.")
    for length in lengths:
        progress(f"rebuilding {length} tokens in {name}")
        # A cache without a config keeps what sliding layers would drop, so that all of it can be compared.
        entering, cache, _ = observed(adapter.decoder, ids[:, :length], DynamicCache())
        for kind in ("full", "sliding"):
            layers = tuple(
                _layer(adapter, layer.index, entering[layer.index], cache.layers[layer.index])
                for layer in geometry.layers
                if layer.kind == kind
            )
            if layers:
                same, pages, rows = (_largest(getattr(layer, part) for layer in layers) for part in _PARTS)
                yield Reconstruction(name, length, kind, same, pages, rows, layers)


_PARTS = ("same", "pages", "rows")


def observed(decoder: Any, ids: Tensor, cache: Any) -> tuple[list[Tensor], Any, Any]:
    """Run stock attention over ``ids``; return the residuals entering each layer, the filled cache, and the output."""
    entering: list[Tensor] = []
    device = next(decoder.parameters()).device
    with attending(None), probing(lambda index, hidden: entering.append(hidden)):
        output = decoder(input_ids=ids.to(device), past_key_values=cache, use_cache=True)
    return entering, cache, output


def difference(rebuilt: tuple[Tensor, Tensor], cached: tuple[Tensor, Tensor]) -> Difference:
    """Compare keys with keys and values with values."""
    return Difference(*(float((a.double() - b.double()).abs().max()) for a, b in zip(rebuilt, cached, strict=True)))


def _layer(adapter: Adapter, index: int, hidden: Tensor, held: Any) -> LayerDifference:
    length = hidden.shape[1]
    positions = torch.arange(length, device=hidden.device).unsqueeze(0)

    def span(low: int, high: int) -> Difference:
        rebuilt = adapter.project(index, hidden[:, low:high], positions[:, low:high])
        return difference(rebuilt, (held.keys[..., low:high, :], held.values[..., low:high, :]))

    page = max(1, length // 3)
    singles = sorted({number * length // SINGLE_ROWS for number in range(SINGLE_ROWS)} | {length - 1})
    return LayerDifference(
        index,
        span(0, length),
        _largest(span(low, min(low + page, length)) for low in range(0, length, page)),
        _largest(span(at, at + 1) for at in singles),
    )


def _largest(differences: Iterator[Difference]) -> Difference:
    largest = Difference()
    for found in differences:
        largest |= found
    return largest
