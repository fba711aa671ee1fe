"""What counted parts do not explain: a made-up model is run, and what is left over becomes the machine's overheads.

Matrices, attention and simple operations are counted and have rates of their own; launching them, waiting for threads,
transposing and copying have not. So each kind of layer is run in a model whose parts are known, and its overhead is
what makes the prediction for that model true. Nothing is fitted to the models that are planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from kvkeep.cache import KeepCache
from kvkeep.models.blocks import quantised
from kvkeep.models.packed import PackedLinear
from kvkeep.models.quiet import quiet
from kvkeep.native.library import library
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.costs import Cost, cost
from kvkeep.plan.machine import LAYERS, Machine
from kvkeep.plan.shape import shape_of
from kvkeep.plan.sizes import sizes

PROMPT, BUDGET = 512, 128
PROMPTS, STEPS = 3, 16
PATIENCE_S = 1.0
"""Seconds that repetitions may take: slow machines repeat less."""
PACKED_BITS = 4
"""Bits of the weights that are measured where models have small ones: those of the embedded models and most files."""

TRIALS = (
    ("full", "full", None, None),
    ("paged", "paged", None, None),
    ("kv-direct", "kv-direct", "kv", 2 * PROMPT),
    ("piece", "kv-direct", "kv", BUDGET),
    ("rebuilt", "kv-direct", "residual", BUDGET),
    ("selected", "window", None, BUDGET),
    ("watched", "snapkv", None, BUDGET),
    ("coded", "quantized:4", None, BUDGET),
    ("tiers", "revive", None, BUDGET),
    ("sketched", "h2o+sketch", None, PROMPT),  # of a text that is as long as the budget: there is nothing to estimate
    ("estimate", "h2o+sketch", None, BUDGET),
    ("segments", "quest", None, BUDGET),
    ("merged", "h2o+merge", None, BUDGET),
    ("neighbours", "kvslimmer", None, BUDGET),
    ("selective", "snapkv+pages", "kv", BUDGET),
)
"""Overhead, and the method, checkpoint and budget whose step tells it once those above are known."""


def with_overheads(machine: Machine, device: str, dtype: torch.dtype) -> Machine:
    """Return ``machine`` with its overheads and the share of simple operations, found by running a made-up model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with quiet():
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
    machine = replace(machine, overhead=dict.fromkeys(LAYERS, 0.0), simple=1.0)
    for name, method, checkpoint, budget in TRIALS:
        candidate = Candidate(method, checkpoint, "device" if checkpoint else None)
        held = sizes(shape.geometry, candidate, PROMPT, budget, STEPS, shared=machine.shared)
        prompt_s, step_s = _run(model, candidate, budget)

        def predicted(machine: Machine, candidate: Candidate = candidate, held: object = held) -> Cost:
            return cost(shape, candidate, held, machine, 1.0)  # type: ignore[arg-type]

        now, more = predicted(machine), predicted(_raised(machine, name, 1.0))
        machine = _raised(machine, name, max(0.0, (step_s - now.step) / (more.step - now.step)))
        now = predicted(machine)
        if name == "full":
            twice = predicted(replace(machine, simple=2.0))
            machine = replace(machine, simple=1.0 + max(0.0, (prompt_s - now.prefill) / (twice.prefill - now.prefill)))
        if name == "watched":
            more = predicted(_raised(machine, "chunk", 1.0))
            chunk_s = max(0.0, (prompt_s - now.prefill) / (more.prefill - now.prefill))
            machine = _raised(machine, "chunk", chunk_s)
    return machine


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether models in ``dtype`` on ``device`` have packed weights that the native library multiplies."""
    return device.type == "cpu" and dtype == torch.bfloat16 and library() is not None


def _pack(model: torch.nn.Module) -> None:
    """Give a model's layers packed weights."""
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            model.set_submodule(name, PackedLinear(quantised(module.weight, PACKED_BITS)))


def _raised(machine: Machine, name: str, seconds: float) -> Machine:
    return replace(machine, overhead={**machine.overhead, name: machine.overhead[name] + seconds})


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
