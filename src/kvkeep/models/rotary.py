"""The native library's cosines and sines of positions; those of torch differ between processors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvkeep.errors import trial
from kvkeep.native.library import kernels, library
from kvkeep.native.structures import EXACT_PAIRS, HALVES, PAIRS, SPREAD_PAIRS

TRIAL_POSITIONS = (0, 1, 77, 1000, 4095)
"""Positions at which the cosines and sines of a module are compared."""


class Rotation(NamedTuple):
    """How a layer rotates each head of its queries and keys."""

    channels: int
    """How many channels are rotated, the first ones; 0: none."""
    angles: int
    """How many cosines the model computes for a position: as many, or half as many, in which both channels that are
    rotated together share one."""
    kind: int = HALVES
    """Which channels are rotated together, as the library numbers it (KvRotation)."""

    @property
    def halves(self) -> bool:
        """Whether both channels that are rotated together share a cosine."""
        return self.angles < self.channels

    @property
    def spread(self) -> bool:
        """Whether the cosines of both channels that are rotated together lie beside each other."""
        return self.kind == SPREAD_PAIRS


class Rotary:
    """Replaces the forward of a module of rotary embeddings. Frequencies of the kinds default, linear, llama3 and
    proportional, and those with one list of factors for all lengths, are computed here in double precision, because
    torch's single-precision powers differ between processors. Frequencies of other kinds are the module's. halves: the
    module returns one cosine and one sine for both channels that are rotated together (gpt-oss). spread: it returns
    those of both beside each other (Command-R)."""

    def __init__(self, module: nn.Module, halves: bool = False, spread: bool = False) -> None:
        self.module, self.halves, self.spread = module, halves, spread
        self.frequencies: dict[str, Tensor] = {}
        """The frequencies of each kind requested so far, (rotated channels of a head / 2,) float32."""
        self.exact = True
        """Whether all angles so far were computed here."""

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (batch, n, dim or dim / 2) each, with the dtype and device of ``x``. position_ids:
        (batch, n), or one such tensor for each dimension of an image, which are the same in a text."""
        if position_ids.ndim == 3 and bool((position_ids == position_ids[:1]).all()):
            position_ids = position_ids[0]
        given = (x, position_ids) if layer_type is None else (x, position_ids, layer_type)
        if x.dtype != torch.bfloat16 or x.device.type != "cpu" or position_ids.ndim != 2:
            return type(self.module).forward(self.module, *given)
        prefix = "" if layer_type is None else f"{layer_type}_"
        if prefix not in self.frequencies:
            stated = getattr(self.module, f"{prefix}inv_freq")
            computed = _frequencies(_parameters(self.module, layer_type), stated)
            self.exact &= computed is not None
            self.frequencies[prefix] = stated.float().contiguous() if computed is None else computed
        frequencies, positions = self.frequencies[prefix], position_ids.to(torch.int64).contiguous()
        cos = torch.empty(*positions.shape, 2 * len(frequencies), dtype=torch.bfloat16)
        sin = torch.empty_like(cos)
        scaling = getattr(self.module, f"{prefix}attention_scaling")
        kernels().kvkeep_angles(positions, frequencies, scaling, cos, sin)
        if not (self.halves or self.spread):
            return cos, sin
        cos, sin = cos[..., : len(frequencies)], sin[..., : len(frequencies)]
        return (cos, sin) if self.halves else (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1))


def replace_rotary(model: Any) -> None:
    """Replace those rotary modules of ``model`` with which the library agrees."""
    if library() is None:
        return
    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__ and (kinds := _kinds(module)):
            for ours in (Rotary(module), Rotary(module, halves=True), Rotary(module, spread=True)):
                with trial("rotary embeddings"):
                    if all(_agrees(ours, kind) for kind in kinds):
                        module.forward = ours
                        break


def rotations_of(model: Any) -> list[Rotation]:
    """Return how the layers of a model may rotate their heads, whose rotary modules have been replaced where they can
    be; the most common way first."""
    widths: dict[int, int] = {}
    for module in model.modules():
        if isinstance(forward := vars(module).get("forward"), Rotary):
            pairs = [len(one) for one in forward.frequencies.values()]
            widths |= {2 * one: one if forward.halves else 2 * one for one in pairs}
        elif isinstance(stated := getattr(module, "inv_freq", None), Tensor):
            widths[2 * len(stated)] = 2 * len(stated)
    ways = [(1, HALVES), (1, PAIRS), (1, EXACT_PAIRS), (1, SPREAD_PAIRS), (0, HALVES)]
    if not widths:
        return [Rotation(0, 0)]
    return [Rotation(part * width, angles, kind) for part, kind in ways for width, angles in widths.items()]


def has_kinds(model: Any) -> bool:
    """Return whether layers of different types of a model rotate by different angles."""
    return any(isinstance(getattr(module, "rope_type", None), dict) for module in model.modules())


def _kinds(module: Any) -> list[str | None]:
    """Return the layer types that a module distinguishes, or [None]; an empty list where frequencies change."""
    stated = getattr(module, "rope_type", "")
    kinds = stated if isinstance(stated, dict) else {None: stated}
    changing = [name for name, kind in kinds.items() if kind == "longrope" and not _factors(_parameters(module, name))]
    return [] if changing or {"dynamic", ""} & set(kinds.values()) else [*kinds]


@torch.no_grad()
def _agrees(ours: Rotary, kind: str | None) -> bool:
    x, positions = torch.empty(0, dtype=torch.bfloat16), torch.tensor([TRIAL_POSITIONS])
    given = (x, positions) if kind is None else (x, positions, kind)
    found, wanted = ours(*given), type(ours.module).forward(ours.module, *given)
    return all(a.shape == b.shape and bool(((a - b).abs() <= 0.01).all()) for a, b in zip(found, wanted, strict=True))


def _parameters(module: Any, kind: str | None) -> dict[str, Any]:
    """Return the config's parameters of a module's angles."""
    stated = getattr(module.config, "rope_parameters", None) or {}
    return stated if kind is None else stated.get(kind, {})


def _frequencies(parameters: dict[str, Any], stated: Tensor) -> Tensor | None:
    """Return the frequencies of ``parameters`` in double precision; None if ``stated``, the module's frequencies, are
    of another kind."""
    count, theta = len(stated), parameters.get("rope_theta")
    if theta is None:
        return None
    factors = _factors(parameters) or [1.0] * count
    if parameters.get("rope_type") == "proportional":  # the last ones of a head do not turn
        turning = int(parameters.get("partial_rotary_factor", 1.0) * count)
        factors = [parameters.get("factor", 1.0)] * turning + [math.inf] * (count - turning)
    plain = [float(theta) ** (-number / count) / factor for number, factor in enumerate(factors)]
    made = torch.tensor([_scaled(parameters, one) for one in plain], dtype=torch.float64)
    same = made.shape == stated.shape and bool(((made - stated.double()).abs() <= 1e-5 * made).all())
    return made.float() if same else None


def _factors(parameters: dict[str, Any]) -> list[float] | None:
    """Return the divisors of the frequencies of the kind longrope if they are the same for all lengths; else None."""
    short, long = (parameters.get(name) for name in ("short_factor", "long_factor"))
    return short if parameters.get("rope_type") == "longrope" and short == long else None


def _scaled(parameters: dict[str, Any], frequency: float) -> float:
    """Return a frequency scaled by its kind; unchanged for an unknown kind."""
    kind, factor = parameters.get("rope_type"), parameters.get("factor", 1.0)
    if kind == "linear":
        return float(frequency / factor)
    if kind != "llama3":
        return frequency
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequency / (2 * math.pi)
    if turns < low:
        return float(frequency / factor)
    if turns > high:
        return frequency
    smooth = (turns - low) / (high - low)
    return float((1 - smooth) * frequency / factor + smooth * frequency)
