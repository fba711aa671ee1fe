"""Bytes predicted are bytes measured."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from families import FAMILIES, REFUSES, tiny

from kvkeep.cache import KeepCache
from kvkeep.errors import BudgetError, UnsupportedModelError
from kvkeep.geometry import ModelGeometry
from kvkeep.plan.candidates import Candidate, candidates
from kvkeep.plan.sizes import sizes


@cache
def geometry(family: str) -> ModelGeometry:
    return ModelGeometry.from_config(tiny(family).config, 4)


ALL = [str(candidate) for candidate in candidates(geometry("llama"))]


def named(label: str, family: str) -> Candidate:
    return next(candidate for candidate in candidates(geometry(family)) if str(candidate) == label)


@torch.inference_mode()
def held(family: str, candidate: Candidate, tokens: int, budget: int, steps: int) -> KeepCache:
    model = tiny(family)
    given = tokens + steps if candidate.method == "static" else budget
    options = {name: value for name, value in candidate.options(given).items() if value is not None}
    if candidate.family.keeps and candidate.method != "static":
        del options["budget"]
    built = KeepCache(model, candidate.method, **options)
    ids = torch.randint(0, 97, (1, tokens + steps), generator=torch.Generator().manual_seed(0))
    model(ids[:, :tokens], past_key_values=built, logits_to_keep=1)
    for step in range(tokens, tokens + steps):
        model(ids[:, step : step + 1], past_key_values=built, logits_to_keep=1)
    return built


def compare(family: str, label: str, tokens: int, budget: int, steps: int) -> None:
    candidate = named(label, family)
    try:
        predicted = sizes(geometry(family), candidate, tokens, budget, steps, steps=steps)
    except BudgetError:
        with pytest.raises(BudgetError):
            held(family, candidate, tokens, budget, steps)
        return
    try:
        memory = held(family, candidate, tokens, budget, steps).memory()
    except UnsupportedModelError:
        plain = family in ("llama", "qwen2", "mistral")
        assert not plain and (family != "qwen3" or candidate.family.fate == "lowrank"), f"{family} takes {label}"
        return
    assert memory.resident_bytes == predicted.resident
    assert memory.compressed_bytes == predicted.compressed
    places = {"device": predicted.device, "host": predicted.host, "disk": predicted.disk}
    assert memory.checkpoint_bytes == places
    assert memory.peak_workspace_bytes <= predicted.workspace
    assert memory.peak_cache_bytes <= predicted.resident + predicted.compressed + predicted.hand
    if candidate.family.fate == "checkpoint" and steps:  # a step comes after what the last chunk evicted
        assert memory.peak_workspace_bytes == predicted.workspace


@pytest.mark.parametrize("label", ALL)
@pytest.mark.parametrize(
    ("tokens", "budget", "steps"), [(411, 160, 0), (300, 64, 5), (90, 160, 2), (500, 256, 9), (450, 20, 40)]
)
def test_bytes_predicted_are_bytes_measured(label: str, tokens: int, budget: int, steps: int) -> None:
    compare("llama", label, tokens, budget, steps)


@pytest.mark.parametrize("label", ALL)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_of_every_family(family: str, label: str) -> None:
    if any(label.endswith(f" {kind}@device") for kind in REFUSES.get(family, ())):
        pytest.skip("refused for this family")
    if label in [str(candidate) for candidate in candidates(geometry(family))]:
        compare(family, label, 333, 150, 3)


@pytest.mark.parametrize("label", ALL)
def test_more_tokens_and_more_entries_never_take_less(label: str) -> None:
    candidate = named(label, "llama")
    last = 0
    for tokens in (200, 400, 800, 1600):
        predicted = sizes(geometry("llama"), candidate, tokens, 160)
        total = predicted.resident + predicted.compressed + predicted.checkpoints
        assert total >= last
        last = total
    resident = [sizes(geometry("llama"), candidate, 3000, budget).resident for budget in (160, 320, 640, 1280)]
    assert resident == sorted(resident)


def test_on_an_accelerator_what_is_moved_takes_room() -> None:
    here, away = (
        sizes(geometry("llama"), named("kv-direct kv@host", "llama"), 2000, 160, shared=shared)
        for shared in (True, False)
    )
    assert here.workspace == 0 < away.workspace
    assert here.memory(shared=True) > here.resident + here.host > away.memory(shared=False)
