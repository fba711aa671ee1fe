"""Record log-probabilities: tiny models of transformers, converted by llama.cpp's converter, computed by llama.cpp."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from architectures import ARCHITECTURES, DIFFERENT
from environment import Environment
from making import gelu_of_ggml, logprobs, model, token_ids, write_folder

CONTEXT = 256
"""Positions of llama.cpp's context, which chooses the factors of a long rope by this number."""
STEP = 1e-5
"""Log-probabilities are stored as integers, in units of this."""


@dataclass(frozen=True)
class Made:
    """A model that transformers computed."""

    variant: str
    single: torch.Tensor
    """Log-probabilities in float32, (positions, vocabulary)."""
    double: torch.Tensor
    """The same in float64."""
    gelu: torch.Tensor
    """The same in float32, but every GELU as ggml computes it."""


def record(environment: Environment, work: Path, out: Path, variants: list[str]) -> dict[str, Any]:
    """Write a model and its log-probabilities for each variant; returns what is said of each, by name."""
    said: dict[str, Any] = {}
    made = {one.variant: one for variant in variants if (one := _made(work, variant, said))}
    files = {variant: work / f"{variant}.gguf" for variant in made}
    failed = environment.convert({work / variant: file for variant, file in files.items()})
    for variant, file in files.items():
        if failed[file]:
            said[variant] = {"converter": str(failed[file])[:160]}
    sound = [variant for variant in files if variant not in said]
    ids = token_ids()
    asked = [
        {"logits": str(files[one]), "ids": ids, "positions": CONTEXT, "out": str(work / f"{one}.npy")} for one in sound
    ]
    for variant, answer in zip(sound, environment.ask(asked), strict=True):
        if "error" in answer:
            said[variant] = {"llama.cpp": answer["error"]}
            continue
        found = torch.from_numpy(numpy.load(work / f"{variant}.npy")).double().log_softmax(-1)
        said[variant] = _differences(made[variant], found)
        _pack(files[variant].read_bytes(), out / f"{variant}.gguf.xz")
        _pack((found / STEP).round().int().numpy().astype("<i4").tobytes(), out / f"{variant}.logprobs.xz")
    return said


def _made(work: Path, variant: str, said: dict[str, Any]) -> Made | None:
    try:
        write_folder(variant, work / variant)
        made = model(variant, computed=True)
        single, double = logprobs(made, torch.float32), logprobs(made, torch.float64)
        with gelu_of_ggml():
            return Made(variant, single, double, logprobs(model(variant, computed=True), torch.float32))
    except Exception as error:
        said[variant] = {"transformers": f"{type(error).__name__}: {error}"}
        return None


def _differences(made: Made, found: torch.Tensor) -> dict[str, Any]:
    """How far llama.cpp is from transformers, at most, and how far transformers' float32 is from its float64."""
    return {
        "class": ARCHITECTURES[made.variant][0],
        "float32": _apart(found, made.single),
        "float64": _apart(found, made.double),
        "gelu": _apart(found, made.gelu),
        "rounding": _apart(made.single, made.double),
        "spread": float(f"{float(found.std()):.2g}"),
    } | ({"why": DIFFERENT[made.variant]} if made.variant in DIFFERENT else {})


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(f"{float((one - other).abs().max()):.2g}")


def _pack(data: bytes, path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 2, "pb": 2}]
    path.write_bytes(lzma.compress(data, filters=filters))


def write_index(path: Path, said: dict[str, Any]) -> None:
    """Add to the index of the records."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    models = {**known.get("models", {}), **said}
    index = {
        "ids": token_ids(),
        "step": STEP,
        "models": {name: models[name] for name in ARCHITECTURES if name in models},
    }
    path.write_text(json.dumps(index, indent=1) + "\n")
