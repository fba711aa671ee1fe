"""Fixed times of a layer and of a page: a made-up model is run, and what its counted parts do not explain is theirs.

Matrices and attention have rates of their own; launching them, waiting for threads, transposing and copying have not.
Nothing is fitted to the models that are planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from kvkeep.cache import KeepCache
from kvkeep.models.blocks import quantised
from kvkeep.models.packed import PackedLinear
from kvkeep.models.silence import silenced
from kvkeep.native.library import library
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.costs import Cost, cost
from kvkeep.plan.machine import Machine
from kvkeep.plan.shape import shape_of
from kvkeep.plan.sizes import Sizes, sizes

PROMPT, BUDGET = 512, 128
PROMPTS, STEPS = 3, 16
PATIENCE_S = 1.0
"""Seconds that repetitions may take: slow machines repeat less."""
PACKED_BITS = 4
"""Bits of the weights that are measured where models have small ones: those of the embedded models and most files."""

TRIALS = (
    ("layer_s", "full", None, None),
    ("bounded_s", "window", None, BUDGET),
    ("page_s", "kv-direct", "kv", BUDGET),
)
"""A rate, and the method, checkpoint and budget whose step tells it once those above are known."""


def with_layers(machine: Machine, device: str, dtype: torch.dtype) -> Machine:
    """Return ``machine`` with the fixed times of layers and pages, and the rate of simple operations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with silenced():
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4 * PROMPT,
        )
        model = LlamaForCausalLM(config).to(device, dtype).eval()
        if packs(torch.device(device), dtype):
            _pack(model)
    shape = shape_of(config, dtype.itemsize)
    for name, method, checkpoint, budget in TRIALS:
        candidate = Candidate(method, checkpoint, "device" if checkpoint else None)
        held = sizes(shape.geometry, candidate, PROMPT, budget, STEPS, shared=machine.shared)
        prompt_s, step_s = _run(model, candidate, budget)

        def predicted(machine: Machine, candidate: Candidate = candidate, held: Sizes = held) -> Cost:
            return cost(shape, candidate, held, machine, 1.0)

        second: dict[str, Any] = {name: 1.0}
        base, more = predicted(machine), predicted(replace(machine, **second))
        found: dict[str, Any] = {name: max(0.0, (step_s - base.step) / (more.step - base.step))}
        machine = replace(machine, **found)
        if name == "layer_s":
            base, slower = predicted(machine), predicted(replace(machine, elementwise=machine.elementwise / 2))
            factor = 1 + max(0.0, (prompt_s - base.prefill) / (slower.prefill - base.prefill))
            machine = replace(machine, elementwise=machine.elementwise / factor)
    return machine


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether models in ``dtype`` on ``device`` have packed weights that the native library multiplies."""
    return device.type == "cpu" and dtype == torch.bfloat16 and library() is not None


def _pack(model: torch.nn.Module) -> None:
    """Give a model's layers packed weights."""
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            model.set_submodule(name, PackedLinear(quantised(module.weight, PACKED_BITS)))


@torch.inference_mode()
def _run(model: torch.nn.Module, candidate: Candidate, budget: int | None) -> tuple[float, float]:
    """Return the seconds of a prompt and of a step: medians, after one to warm up."""
    given = {name: value for name, value in candidate.options(budget).items() if value is not None}
    device = next(model.parameters()).device
    cache = KeepCache(model, candidate.spec, **given)
    ids = torch.zeros(1, PROMPT, dtype=torch.long, device=device)

    def timed(ids: torch.Tensor) -> float:
        start = time.perf_counter()
        model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1, 0].item()  # waits for the device
        return time.perf_counter() - start

    def prompt() -> float:
        cache.reset()
        return timed(ids)

    prompt_s = _median(prompt, PROMPTS)
    return prompt_s, _median(lambda: timed(ids[:, :1]), STEPS)


def _median(call: Callable[[], float], rounds: int) -> float:
    """Return the median of what ``call`` returns, without the first, which warms up; the first alone, where that takes
    longer than there is patience."""
    first = call()
    times: list[float] = []
    while len(times) < rounds and first + sum(times) < PATIENCE_S:
        times.append(call())
    return median(times or [first])
