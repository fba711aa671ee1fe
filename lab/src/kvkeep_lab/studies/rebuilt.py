"""``rebuilt``: compares keys and values rebuilt from residuals with the cached ones (KV-Direct's Table 2, and section
5.4 for sliding windows), and measures their entropy given the residual (Eq. 17, arXiv:2603.19664)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import DynamicCache

from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import Adapter
from kvkeep.models.binding import bind
from kvkeep_lab.figures import FilePath, dress, panels, styled
from kvkeep_lab.prompts import built_in
from kvkeep_lab.statistics import conditional_entropy, each, where
from kvkeep_lab.studies.base import Study, Trial
from kvkeep_lab.studies.windows import Difference, Windows, beyond_the_window, difference, observed, text_length
from kvkeep_lab.tables import Table, number
from kvkeep_lab.tasks.base import Metric

SINGLE_ROWS = 16
"""Number of tokens that are also rebuilt one by one, spread evenly over the text."""


@dataclass(frozen=True)
class Entropy:
    """Entropy of keys and values given the residual, in bits per token: of one layer, or the maximum over layers.
    Eq. 17 gives 0."""

    ordered: float = 0.0
    """Entropy given residual and position, over the cached entry and the one rebuilt with the same shapes."""
    any_order: float = 0.0
    """The same, also over the entries rebuilt by pages and by single rows."""
    keys: float = 0.0
    """Entropy of the cached keys given only the residual, as in the equation. At the first layer, a token that occurs
    twice has one residual and two positions."""
    values: float = 0.0
    """Entropy of the cached values given only the residual."""

    def __or__(self, other: Entropy) -> Entropy:
        """Return the larger value of each field."""
        return Entropy(**{name: max(value, getattr(other, name)) for name, value in asdict(self).items()})


@dataclass(frozen=True)
class LayerDifference:
    """The differences of one layer. With other shapes, sums may be computed in another order."""

    layer: int
    same: Difference
    """All rows at once, with the shapes of the forward pass."""
    pages: Difference
    """A third of the rows at a time."""
    rows: Difference
    """Single tokens."""
    entropy: Entropy = Entropy()


@dataclass(frozen=True)
class RebuiltEntries:
    """The largest differences of all layers of one ``kind`` ("full", "sliding"), in one dtype and at one length."""

    dtype: str
    length: int
    kind: str
    same: Difference
    pages: Difference
    rows: Difference
    layers: tuple[LayerDifference, ...]
    entropy: Entropy | None = None
    """None in results of earlier versions of kvkeep."""

    @property
    def holds(self) -> bool:
        """Whether all bits are equal with the same shapes. The claim does not cover other shapes."""
        return self.same.none


_PARTS = {"same": "same shapes", "pages": "by pages", "rows": "by single rows"}


@dataclass(frozen=True)
class Differences:
    """The differences by dtype, length and kind of layer, and those beyond sliding windows, if the model has any."""

    rows: list[RebuiltEntries]
    windows: Windows | None


class Rebuilt(Study):
    """KV-Direct's Table 2, and section 5.4 for sliding windows."""

    name = "rebuilt"
    about = "keys and values rebuilt from residuals against the cached ones, by length and dtype"
    protocol = (
        "One forward pass; then every layer's keys and values are projected again from the residuals that entered it, "
        "by the layer's own modules: with the same shapes, by pages of a third, and by single rows (other shapes may "
        "add up in another order). Largest absolute difference of all layers of a kind. Entropy: of the bits of an "
        "entry given its residual (and position), over the ways it was made; the most of all layers."
    )
    found = Differences
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("keys", "max |ΔK|, same shapes", "lower", "number"),
        Metric("values", "max |ΔV|, same shapes", "lower", "number"),
        Metric("window", "max |ΔK| in what a window holds", "lower", "number"),
        Metric("entropy", "bits of an entry given its residual and position, same shapes", "lower", "number"),
        Metric("entropy_any", "bits of an entry given these, any shapes", "lower", "number"),
        Metric("entropy_keys", "bits of a key given its residual alone", "lower", "number"),
    )
    certain = ("keys", "values", "window", "entropy", "entropy_any", "entropy_keys")

    lengths: list[int] = Field([16, 32, 64, 128, 256], min_length=1, description="tokens")
    dtypes: list[Literal["float32", "bfloat16", "float16"]] = Field(
        ["float32", "bfloat16", "float16"], min_length=1, description="the model is cast to"
    )

    def measure(self, trial: Trial) -> Differences:
        model, tokenizer = trial.model, trial.tokenizer
        beyond = text_length(ModelGeometry.from_config(model.config), new=6)
        steps = len(self.dtypes) * len(self.lengths) + bool(beyond)
        ids = built_in(tokenizer, max(self.lengths))
        rows: list[RebuiltEntries] = []
        for place, name in enumerate(self.dtypes):
            for row in reconstruction(model, ids, self.lengths, name):
                rows.append(row)
                done = place * len(self.lengths) + self.lengths.index(row.length) + 1
                trial.progress(f"{row.length} tokens in {name}", done, steps)
        windows = None
        if beyond:
            trial.progress("sliding windows", steps - 1, steps)
            windows = beyond_the_window(model, built_in(tokenizer, beyond), new=6)
        return Differences(rows, windows)

    def plain(self, found: Differences) -> Any:
        return super().plain(replace(found, rows=[replace(row, layers=()) for row in found.rows]))

    def scores(self, found: Differences) -> dict[str, float]:
        scores = {name: max(getattr(row.same, name) for row in found.rows) for name in ("keys", "values")}
        if bits := [row.entropy for row in found.rows if row.entropy is not None]:
            union = reduce(or_, bits)
            scores |= {"entropy": union.ordered, "entropy_any": union.any_order, "entropy_keys": union.keys}
        return scores if found.windows is None else scores | {"window": found.windows.held.keys}

    def tables(self, found: Differences) -> list[Table]:
        """Return Table 2, and a table of the differences beyond windows."""
        table = Table(
            "Rebuilt against cached: max |ΔK|, max |ΔV|",
            ["dtype, layers", "tokens", *_PARTS.values(), "H(K, V | h, p)", "any shapes", "H(K | h)", "H(V | h)"],
            notes=[
                "The paper: 0, 0 for full layers at 16 to 256 tokens in four dtypes; > 0, 0 for sliding ones. H: bits "
                "a token, the most of all layers, given the residual h and the position p; its Eq. 17 says 0 of h."
            ],
        )
        for row in found.rows:
            sizes = [str(getattr(row, part)) for part in _PARTS]
            bits = ["-"] * 4 if row.entropy is None else [number(value, 2) for value in asdict(row.entropy).values()]
            table.rows.append([f"{row.dtype}, {row.kind}", f"{row.length}", *sizes, *bits])
        return [table] if found.windows is None else [table, found.windows.table()]

    def draw(self, found: Differences, path: FilePath, *, title: str) -> None:
        """Draw the largest difference by length, dtype and shapes. A difference of 0 lies on the axis."""
        title = f"{title}: largest difference of keys and values"
        lines = each(found.rows, "dtype", "kind")
        with panels(path, title, 3, 4.2, sharey=True) as grid:
            for axes, (part, words) in zip(grid, _PARTS.items(), strict=True):
                for place, (dtype, kind) in enumerate(lines):
                    mine = where(found.rows, dtype=dtype, kind=kind)
                    lengths, parts = [row.length for row in mine], [getattr(row, part) for row in mine]
                    style = styled(place, f"{dtype}, {kind} layers", None)
                    axes.plot(lengths, [max(one.keys, one.values) for one in parts], clip_on=False, **style)
                dress(axes, words, "tokens", x="log2", legend=axes is grid[0])
                axes.set_yscale("symlog", linthresh=1e-8)
                axes.set_ylim(bottom=0)


@torch.no_grad()
def reconstruction(model: Any, ids: Tensor, lengths: Sequence[int], name: str) -> Iterator[RebuiltEntries]:
    """Rebuild keys and values from the residuals of a forward pass in the dtype called ``name``, for each length.

    A dtype other than the model's uses a temporary copy of the model. Keys of sliding layers are compared at all
    positions; :mod:`kvkeep_lab.studies.windows` compares those in the windowed cache.
    """
    bind(model)
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    cast = model if next(model.parameters()).dtype == dtype else copy.deepcopy(model).to(dtype)
    adapter = Adapter(cast)
    geometry = ModelGeometry.from_config(model.config)
    for length in lengths:
        # A cache without a config stores all entries of sliding layers too, so that all can be compared.
        entering, cache = observed(adapter.decoder, ids[:, :length], DynamicCache())
        for kind in ("full", "sliding"):
            layers = tuple(
                _layer(adapter, layer.index, entering[layer.index], cache.layers[layer.index])
                for layer in geometry.layers
                if layer.kind == kind
            )
            if layers:
                same, pages, rows, bits = (
                    reduce(or_, (getattr(layer, part) for layer in layers)) for part in (*_PARTS, "entropy")
                )
                yield RebuiltEntries(name, length, kind, same, pages, rows, layers, bits)


def _layer(adapter: Adapter, index: int, hidden: Tensor, cached_layer: Any) -> LayerDifference:
    length = hidden.shape[1]
    positions = torch.arange(length, device=hidden.device).unsqueeze(0)
    cached = _flat((cached_layer.keys, cached_layer.values))

    def span(low: int, high: int) -> Tensor:
        return _flat(adapter.project(index, hidden[:, low:high], positions[:, low:high]))

    page = max(1, length // 3)
    singles = sorted({number * length // SINGLE_ROWS for number in range(SINGLE_ROWS)} | {length - 1})
    same = span(0, length)
    pages = torch.cat([span(low, min(low + page, length)) for low in range(0, length, page)])
    rows = torch.cat([span(at, at + 1) for at in singles])
    keys = cached_layer.keys.shape[1] * cached_layer.keys.shape[-1]  # elements of a token's keys, before its values

    def apart(rebuilt: Tensor, expected: Tensor) -> Difference:
        return difference((rebuilt[:, :keys], rebuilt[:, keys:]), (expected[:, :keys], expected[:, keys:]))

    differences = apart(same, cached), apart(pages, cached), apart(rows, cached[singles])
    known = _bits(hidden[0])
    placed = torch.cat([known, _bits(positions[0, :, None])], dim=1)  # residual and position, (tokens, bytes)
    ways = [_bits(part[singles]) for part in (cached, same, pages)] + [_bits(rows)]
    entropy = Entropy(
        conditional_entropy(torch.cat([_bits(cached), _bits(same)]), placed.repeat(2, 1)),
        conditional_entropy(torch.cat(ways), placed[singles].repeat(len(ways), 1)),
        conditional_entropy(_bits(cached[:, :keys]), known),
        conditional_entropy(_bits(cached[:, keys:]), known),
    )
    return LayerDifference(index, *differences, entropy)


def _flat(entries: tuple[Tensor, Tensor]) -> Tensor:
    """Return keys and values (1, heads, tokens, dim) side by side, (tokens, elements)."""
    return torch.cat([part[0].transpose(0, 1).flatten(1) for part in entries], dim=1)


def _bits(rows: Tensor) -> Tensor:
    """Return the bytes of each row, (rows, bytes). Bytes distinguish 0 from -0, and equal NaNs are equal."""
    return rows.contiguous().view(torch.uint8)
