"""Cosines and sines of positions by the native library: torch's own differ from one processor to another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.native.library import kernels, library

TRIAL = (0, 1, 77, 1000, 4095)
"""Positions at which a module's own cosines and sines are compared."""


class Rotary:
    """The forward of a module of rotary embeddings, in place of its own. Frequencies are those of the config where the
    module's are of the plain kind: a power that is computed in single precision has other bits elsewhere."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.frequencies: dict[str, Tensor] = {}

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (batch, n, dim) each. x: anything of the dtype and device that is wanted."""
        given = (x, position_ids) if layer_type is None else (x, position_ids, layer_type)
        if x.dtype != torch.bfloat16 or x.device.type != "cpu":
            return type(self.module).forward(self.module, *given)
        prefix = "" if layer_type is None else f"{layer_type}_"
        if prefix not in self.frequencies:
            self.frequencies[prefix] = _frequencies(getattr(self.module, f"{prefix}inv_freq"))
        frequencies, positions = self.frequencies[prefix], position_ids.to(torch.int64).contiguous()
        cos = torch.empty(*positions.shape, 2 * len(frequencies), dtype=torch.bfloat16)
        sin = torch.empty_like(cos)
        kernels().kvkeep_angles(
            positions.data_ptr(),
            positions.numel(),
            frequencies.data_ptr(),
            len(frequencies),
            getattr(self.module, f"{prefix}attention_scaling"),
            cos.data_ptr(),
            sin.data_ptr(),
        )
        return cos, sin


def replace_rotary(model: Any) -> None:
    """Let the library compute the angles of those modules of ``model`` with which it agrees."""
    if library() is None:
        return
    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__ and (kinds := _kinds(module)):
            ours = Rotary(module)
            if all(_agrees(ours, kind) for kind in kinds):
                module.forward = ours


def _kinds(module: Any) -> list[str | None]:
    """Return the layer types that a module tells apart, or None alone; nothing where frequencies change."""
    stated = getattr(module, "rope_type", "")
    kinds = stated if isinstance(stated, dict) else {None: stated}
    return [] if {"dynamic", "longrope", ""} & set(kinds.values()) else [*kinds]


@torch.no_grad()
def _agrees(ours: Rotary, kind: str | None) -> bool:
    x, positions = torch.empty(0, dtype=torch.bfloat16), torch.tensor([TRIAL])
    given = (x, positions) if kind is None else (x, positions, kind)
    try:
        found, wanted = ours(*given), type(ours.module).forward(ours.module, *given)
    except (AttributeError, TypeError, RuntimeError):
        return False
    return all(a.shape == b.shape and bool(((a - b).abs() <= 0.01).all()) for a, b in zip(found, wanted, strict=True))


def _frequencies(stated: Tensor) -> Tensor:
    """Return frequencies without what single precision made of the power: theta ** (-i / n), theta taken from the last
    one, where all are of that form; else as they are."""
    count = len(stated)
    if count < 2 or float(stated[0]) != 1.0 or float(stated[-1]) <= 0:  # some heads do not turn at all
        return stated.float().contiguous()
    theta = float(round(float(stated[-1]) ** (-count / (count - 1))))
    for guess in (theta, float(f"{theta:.2g}"), float(f"{theta:.3g}"), float(f"{theta:.4g}")):
        made = torch.tensor([guess ** (-number / count) for number in range(count)], dtype=torch.float64)
        if bool(((made - stated.double()).abs() <= 4e-7 * made).all()):
            return made.float()
    return stated.float().contiguous()
