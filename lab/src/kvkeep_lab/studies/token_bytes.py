"""``token-bytes``: bytes per token as keys and values, as one residual, and as each kind of checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from transformers import DynamicCache

from kvkeep.geometry import TOKEN_ID_BYTES, ModelGeometry
from kvkeep.memory.meter import nbytes
from kvkeep_lab.figures import COLOURS, FilePath, dress, panels
from kvkeep_lab.shapes import SHAPES, Shape, config_of
from kvkeep_lab.studies.base import Study, Trial
from kvkeep_lab.tables import Table, number
from kvkeep_lab.tasks.base import Metric

PAPER = {
    "smollm2-135m": "22.5, 1.1, 20.0",
    "qwen2.5-0.5b": "12.0, 1.8, 6.9",
    "qwen3-0.6b": "112.0, 2.0, 56.0",
    "r1-distill-qwen-1.5b": "28.0, 3.0, 9.3",
    "qwen2.5-1.5b": "28.0, 3.0, 9.3",
    "gemma3-4b": "136.0, 5.0, 27.2",
}
"""KV-Direct's Table 1: KB of keys and values, KB of one residual, rho."""

_READ = 16  # tokens read to measure a cache


@dataclass(frozen=True)
class TokenSize:
    """One model. Sizes are bytes per token."""

    model: str
    full: int
    """Number of full layers."""
    sliding: int
    """Number of sliding layers."""
    kv_heads: int
    head_dim: int
    hidden: int
    entries: int
    residual: int
    """Bytes of one vector (Eq. 24)."""
    rho: float
    checkpoints: dict[str, int]
    """Bytes by kind of checkpoint."""
    held: float | None = None
    """Measured bytes of transformers' cache; None for models that were not loaded."""


@dataclass(frozen=True)
class TokenSizes:
    """All models; the loaded one is first."""

    rows: list[TokenSize]


class TokenBytes(Study):
    """KV-Direct's Table 1 and Fig. 2, computed from configs. The loaded model has its dtype, and its cache is also
    measured."""

    name = "token-bytes"
    about = "bytes a token: keys and values, one residual, every kind of checkpoint"
    protocol = (
        "From configs, nothing loaded but the model in hand, whose cache is measured, too. One residual is what the "
        "paper counts (Eq. 24); to rebuild entries by one product a layer it takes one for each full layer (residual), "
        "or fewer and the layers between (residual:s); from ids alone all layers are run again (tokens)."
    )
    found = TokenSizes
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("rho", "ρ", "higher", "number"),
        Metric("entries", "KB of keys and values a token, 2 bytes an element", "lower", "number"),
        Metric("residual", "KB of one residual, 2 bytes an element", "lower", "number"),
        Metric("held", "bytes that transformers' cache held, by those predicted", "lower", "number"),
    )
    certain = ("rho", "entries", "residual", "held")

    shapes: list[Shape] = Field(list(SHAPES), description=f"published models: {', '.join(SHAPES)}")
    dtype_bytes: int = Field(2, ge=1, description="bytes of an element, for those")
    stride: int = Field(4, ge=2, description="of the checkpoint kind residual:s")

    def measure(self, trial: Trial) -> TokenSizes:
        model = trial.model
        cache = DynamicCache(config=model.config)
        ids = torch.arange(_READ, device=model.device).unsqueeze(0)
        with torch.no_grad():
            model(ids, cache=cache, logits_to_keep=1)
        measured = sum(nbytes(layer.keys, layer.values) for layer in cache.layers) / _READ
        rows = [self._sizes(trial.loaded.name, model.config, model.dtype.itemsize, measured)]
        return TokenSizes(rows + [self._sizes(name, config_of(name), self.dtype_bytes) for name in self.shapes])

    def _sizes(self, name: str, config: Any, itemsize: int, measured: float | None = None) -> TokenSize:
        geometry = ModelGeometry.from_config(config, itemsize)
        layer = geometry.layers[0]
        sized = geometry.residual_checkpoint_bytes_per_token
        checkpoints = {"kv": geometry.full_bytes_per_token, "residual": sized()}
        checkpoints |= {f"residual:{self.stride}": sized(self.stride), "tokens": TOKEN_ID_BYTES}
        layers = len(geometry.full_layers), len(geometry.sliding_layers)
        shape = *layers, layer.kv_heads, layer.key_dim, geometry.hidden_size
        entry, residual = geometry.kv_bytes_per_token, geometry.residual_bytes_per_token
        sizes = entry, residual, entry / residual
        return TokenSize(name, *shape, *sizes, checkpoints, measured)

    def scores(self, found: TokenSizes) -> dict[str, float]:
        """Return the loaded model's sizes, converted to the paper's dtype."""
        mine = found.rows[0]
        assert mine.held is not None
        kb = 2 * mine.hidden / mine.residual / 1024  # KB per byte of the loaded dtype
        sizes = {"entries": kb * mine.entries, "residual": kb * mine.residual}
        return {"rho": mine.rho, **sizes, "held": mine.held / mine.entries}

    def tables(self, found: TokenSizes) -> list[Table]:
        """Return Table 1 with a column for each kind of checkpoint."""
        kinds = list(found.rows[0].checkpoints)
        table = Table(
            f"KB a token ({self.dtype_bytes} bytes an element; the first row as it was loaded)",
            ["model", "layers", "KV heads × width", "d", "keys and values", "one residual", "ρ", "the paper's", *kinds],
            notes=["Layers: full, and with a window. Checkpoints are of full layers; 1 KB is 1,024 bytes."],
        )
        for row in found.rows:
            layers = f"{row.full} + {row.sliding}" if row.sliding else f"{row.full}"
            shape = [row.model, layers, f"{row.kv_heads} × {row.head_dim}", f"{row.hidden:,}"]
            sizes = [_kb(row.entries), _kb(row.residual), f"{row.rho:.1f}", PAPER.get(row.model, "")]
            table.rows.append([*shape, *sizes, *(_kb(row.checkpoints[kind]) for kind in kinds)])
        return [table]

    def draw(self, found: TokenSizes, path: FilePath, *, title: str) -> None:
        kinds = {"keys and values": [row.entries for row in found.rows]}
        kinds["one residual (the paper's)"] = [row.residual for row in found.rows]
        for kind in list(found.rows[0].checkpoints)[1:]:
            kinds[f"checkpoint {kind}"] = [row.checkpoints[kind] for row in found.rows]
        width = 0.8 / len(kinds)
        with panels(path, title, height=4.6) as (axes,):
            for place, (label, sizes) in enumerate(kinds.items()):
                across = [model + (place - len(kinds) / 2 + 0.5) * width for model in range(len(found.rows))]
                axes.bar(across, [size / 1024 for size in sizes], width, color=COLOURS[place], label=label)
            axes.set_xticks(range(len(found.rows)), [row.model for row in found.rows], fontsize=8)
            dress(axes, "KB a token", y="log", grid="y")
            axes.legend(frameon=False, fontsize=8, ncols=len(kinds), loc="upper left")
            axes.set_ylim(top=10 * max(row.entries for row in found.rows) / 1024)


def _kb(size: int) -> str:
    return number(size / 1024)
