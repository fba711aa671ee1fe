"""Bytes predicted are bytes measured: of every case in ``tests/cases.py``, each on a quarter of the families (others
for each KVKEEP_TURN), and of every candidate."""

from __future__ import annotations

from functools import cache as memoised

import pytest
from cases import ALL, CASES, TURN, taken
from families import tiny
from helpers import prompt, step

from kvkeep import BudgetError, KeepCache, UnsupportedModelError
from kvkeep.geometry import ModelGeometry
from kvkeep.plan.candidates import Candidate, candidates
from kvkeep.plan.sizes import sizes
from kvkeep.policies.methods import resolve


@memoised
def geometry(family: str) -> ModelGeometry:
    return ModelGeometry.from_config(tiny(family).config, 4)


@memoised
def listed(family: str) -> dict[str, Candidate]:
    return {str(candidate): candidate for candidate in candidates(geometry(family))}


LABELS = [*listed("llama")]


def compare(family: str, candidate: Candidate, tokens: int, budget: int | None, steps: int) -> None:
    """Hold the bytes of a cache that read ``tokens`` tokens at once and ``steps`` one by one against the prediction."""
    if candidate.keeps_all:  # a static cache holds the whole text
        budget = tokens + steps if candidate.method.budgeted else None
    options = {name: value for name, value in candidate.options(budget).items() if value is not None}
    try:
        predicted = sizes(geometry(family), candidate, tokens, budget, steps=steps, model=tiny(family))
    except BudgetError:
        with pytest.raises(BudgetError):
            KeepCache(tiny(family), candidate.spec, **options)
        return
    built, ids = KeepCache(tiny(family), candidate.spec, **options), prompt(1, tokens + steps)
    for low, high in ((0, tokens), *((at, at + 1) for at in range(tokens, tokens + steps))):
        step(family, built, ids[:, low:high])
    memory = built.memory()
    assert memory.resident_bytes == predicted.resident
    assert memory.compressed_bytes == predicted.compressed
    assert memory.checkpoint_bytes == {"device": predicted.device, "host": predicted.host, "disk": predicted.disk}
    if candidate.method.fate.predictable:
        assert memory.peak_workspace_bytes <= predicted.workspace
    assert memory.peak_cache_bytes <= predicted.resident + predicted.compressed + predicted.chunk_bytes
    if candidate.method.selector.in_order and steps:  # a step comes after what the last chunk evicted
        assert memory.peak_workspace_bytes == predicted.workspace


def candidate_of(name: str) -> Candidate:
    """A case as the planner knows it, where its options leave that."""
    case, made = CASES[name], Candidate(resolve(CASES[name].spec))
    if not made.method.checkpoints:
        return made
    kind = made.method.kind or case.options.get("checkpoint") or "kv"
    return Candidate(made.method, kind, case.options.get("where", "disk"))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.method.reading is None])
def test_every_case_on_a_quarter_of_the_families(name: str) -> None:
    """Each family with another length, budget and number of steps."""
    candidate, first = candidate_of(name), ([*CASES].index(name) + TURN) % 4
    for place, family in enumerate([family for family in ALL if taken(name, family)][first::4]):
        tokens, budget, steps = ((233, 150, 2), (90, 160, 1), (200, 64, 3), (170, 40, 1))[(place + len(name)) % 4]
        compare(family, candidate, tokens, budget, steps)


@pytest.mark.parametrize("label", LABELS)
def test_every_candidate_whatever_the_budget(label: str) -> None:
    """One for each: cases without a checkpoint have others on other families."""
    tokens, budget, steps = ((311, 160, 0), (400, 256, 3), (250, 20, 24))[(len(label) + TURN) % 3]
    compare("llama", listed("llama")[label], tokens, budget, steps)


@pytest.mark.parametrize("family", ALL)
def test_candidates_of_a_family_are_built_or_refused_by_name(family: str) -> None:
    for candidate in candidates(geometry(family)):
        if "@" in str(candidate) and not str(candidate).endswith("@device"):
            continue
        try:
            options = {name: value for name, value in candidate.options(160).items() if value}
            KeepCache(tiny(family), candidate.spec, **({} if candidate.keeps_all else options))
        except UnsupportedModelError as error:
            assert tiny(family).config.model_type in str(error)
            assert family not in ("llama", "mistral", "qwen2")


@pytest.mark.parametrize("label", LABELS)
def test_more_tokens_and_more_entries_never_take_less(label: str) -> None:
    candidate, last = listed("llama")[label], 0
    room = geometry("llama").kv_bytes_per_token  # an entry's, which precision tiers cannot always use to the last byte
    for tokens in (200, 400, 800, 1600):
        predicted = sizes(geometry("llama"), candidate, tokens, 160)
        now = predicted.resident + predicted.compressed + predicted.checkpoints
        assert now >= last - room
        last = now
    resident = [sizes(geometry("llama"), candidate, 3000, budget).resident for budget in (160, 320, 640, 1280)]
    assert resident == sorted(resident)


def test_on_an_accelerator_what_is_moved_takes_room() -> None:
    direct = listed("llama")["kv-direct kv@host"]
    here, away = (sizes(geometry("llama"), direct, 2000, 160, shared=shared) for shared in (True, False))
    assert here.workspace == 0 < away.workspace
    assert here.memory(shared=True) > here.resident + here.host > away.memory(shared=False)
