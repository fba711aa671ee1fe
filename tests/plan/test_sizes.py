"""Bytes predicted are bytes measured: of every case in ``tests/cases.py``, each on a quarter of the families (others
for each KVKEEP_TURN), and of every listed method with every kind and place of its checkpoint."""

from __future__ import annotations

from functools import cache as memoised
from typing import Any, NamedTuple

import pytest
from cases import ALL, CASES, TURN, taken
from families import tiny
from helpers import prompt, step

from kvkeep import BudgetError, KeepCache, UnsupportedModelError
from kvkeep.geometry import ModelGeometry
from kvkeep.plan.fitting import listed
from kvkeep.plan.sizes import Sizes, sizes
from kvkeep.policies.methods import resolve
from kvkeep.policies.registry import Method
from kvkeep.stores.checkpoints.spec import CheckpointSpec


@memoised
def geometry(family: str) -> ModelGeometry:
    return ModelGeometry.from_config(tiny(family).config, 4)


class Cache(NamedTuple):
    """A method, and its checkpoint if it has one."""

    method: Method
    spec: CheckpointSpec | None = None

    def options(self, budget: int) -> dict[str, Any]:
        stored = {} if self.spec is None else {"checkpoint": str(self.spec), "where": self.spec.where}
        limited = self.method.budgeted or not self.method.selector.keeps_all
        return stored | ({"budget": budget} if limited else {})

    def sizes(self, family: str, tokens: int, budget: int, **given: Any) -> Sizes:
        return sizes(geometry(family), self.method, tokens, budget, self.spec, **given)


def caches(layers: int) -> dict[str, Cache]:
    """Every listed method, with every kind of checkpoint that a model of ``layers`` layers can have, in every place."""
    stride = layers // 4
    kinds = ["kv", "residual", *([f"residual:{stride}"] if stride > 1 else []), "tokens"]
    found = {}
    for name in listed():
        method = resolve(name)
        if not method.checkpoints:
            found[name] = Cache(method)
            continue
        for kind in kinds[:2] if name == "kv-lru" else kinds:  # it recalls single entries
            for where in ("device",) if kind == "tokens" else ("device", "host", "disk"):
                found[f"{name} {kind}@{where}"] = Cache(method, CheckpointSpec.parse(kind, where))
    return found


CACHES = caches(len(geometry("llama").layers))


def compare(family: str, cache: Cache, tokens: int, budget: int, steps: int) -> None:
    """Hold the bytes of a cache that read ``tokens`` tokens at once and ``steps`` one by one against the prediction."""
    if cache.method.selector.keeps_all:
        budget = tokens + steps  # of `static`
    options = cache.options(budget)
    try:
        predicted = cache.sizes(family, tokens, budget, steps=steps, model=tiny(family))
    except BudgetError:
        with pytest.raises(BudgetError):
            KeepCache(tiny(family), cache.method.name, **options)
        return
    built, ids = KeepCache(tiny(family), cache.method.name, **options), prompt(1, tokens + steps)
    for low, high in ((0, tokens), *((at, at + 1) for at in range(tokens, tokens + steps))):
        step(family, built, ids[:, low:high])
    memory = built.memory()
    assert memory.resident_bytes == predicted.resident
    assert memory.compressed_bytes == predicted.compressed
    assert memory.checkpoint_bytes == {"device": predicted.device, "host": predicted.host, "disk": predicted.disk}
    if cache.method.fate.predictable:
        assert memory.peak_workspace_bytes <= predicted.workspace
    assert memory.peak_cache_bytes <= predicted.resident + predicted.compressed + predicted.chunk_bytes
    if cache.method.selector.in_order and steps:  # a step comes after what the last chunk evicted
        assert memory.peak_workspace_bytes == predicted.workspace


def cache_of(name: str) -> Cache:
    """The cache of a case, where its options leave that."""
    case, method = CASES[name], resolve(CASES[name].spec)
    if not method.checkpoints:
        return Cache(method)
    kind = method.kind or case.options.get("checkpoint") or "kv"
    return Cache(method, CheckpointSpec.parse(kind, case.options.get("where", "disk")))


@pytest.mark.turns(8)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.method.reading is None])
def test_every_case_on_a_quarter_of_the_families(name: str) -> None:
    """Each family with another length, budget and number of steps."""
    cache, first = cache_of(name), ([*CASES].index(name) + TURN) % 4
    for place, family in enumerate([family for family in ALL if taken(name, family)][first::4]):
        tokens, budget, steps = ((233, 150, 2), (90, 160, 1), (200, 64, 3), (170, 40, 1))[(place + len(name)) % 4]
        compare(family, cache, tokens, budget, steps)


@pytest.mark.turns(4)
@pytest.mark.parametrize("label", CACHES)
def test_every_kind_and_place_whatever_the_budget(label: str) -> None:
    """One for each: cases without a checkpoint have others on other families."""
    tokens, budget, steps = ((311, 160, 0), (400, 256, 3), (250, 20, 24))[(len(label) + TURN) % 3]
    compare("llama", CACHES[label], tokens, budget, steps)


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", ALL)
def test_caches_of_a_family_are_built_or_refused_by_name(family: str) -> None:
    for label, cache in caches(len(geometry(family).layers)).items():
        if "@" in label and not label.endswith("@device"):
            continue
        try:
            KeepCache(tiny(family), cache.method.name, **cache.options(160))
        except UnsupportedModelError as error:
            assert tiny(family).config.model_type in str(error)
            assert family not in ("llama", "mistral", "qwen2")


@pytest.mark.parametrize("label", CACHES)
def test_more_tokens_and_more_entries_never_take_less(label: str) -> None:
    cache, last = CACHES[label], 0
    room = geometry("llama").kv_bytes_per_token  # an entry's, which precision tiers cannot always use to the last byte
    for tokens in (200, 400, 800, 1600):
        one = cache.sizes("llama", tokens, 160)
        now = one.resident + one.compressed + one.device + one.host + one.disk
        assert now >= last - room
        last = now
    resident = [cache.sizes("llama", 3000, budget).resident for budget in (160, 320, 640, 1280)]
    assert resident == sorted(resident)


def test_on_an_accelerator_what_is_moved_takes_room() -> None:
    for where in ("disk", "host"):  # from the host, buffers that the budget counts
        direct = CACHES[f"kv-direct kv@{where}"]
        here, away = (direct.sizes("llama", 2000, 160, shared=shared) for shared in (True, False))
        assert here.workspace + here.device == 0 < away.workspace + away.device
    assert away.resident + away.device <= here.resident
    assert here.memory(shared=True) > here.resident + here.host > away.memory(shared=False)
