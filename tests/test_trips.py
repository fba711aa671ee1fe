"""Two trips of docs/architecture.md name the files that a run goes through, but those that do the same for any task."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import saved
from families import tiny
from helpers import prompt

from kvkeep.cli.cache_options import CacheOptions
from kvkeep.decode.generate import generate
from kvkeep.engine.answer import Answer, Ask, Scheduler
from kvkeep.models.loading import load
from kvkeep.policies.methods import load_plugins

ROOT = Path(__file__).parents[1]
CORE = f"{ROOT / 'src' / 'kvkeep'}/"
pytestmark = pytest.mark.usefixtures("kernels")

DATA = ("contracts/", "memory/", "attention/inputs.py", "step/plan.py", "stores/checkpoints/spec.py", "geometry.py")
"""Types of data, what parts promise, and rows of tensors."""
MODULES = ("step/sinks.py", "step/scores.py")
"""Each attention module is asked whether it has sinks, and caps its scores."""
LIBRARY = ("native/", "step/choice.py", "step/native/__init__.py", "step/native/calls.py", "step/native/entries.py")
"""The library is chosen and called, whatever it does."""
MODEL = ("models/adapter.py", "models/forward.py", "models/packed.py", "models/rotary.py")
"""The model computes, and is asked once what it can do."""
CHECKS = (
    "models/chunks.py", "models/same_text.py", "models/unchanged.py", "passes/pass_owner.py",
    "passes/repeated_steps.py", "step/checks.py",
)  # fmt: skip
"""An input is compared with what its cache has read, modules with what they were, a thread and a step are checked, and
earlier steps are looked for."""
FILES = ("files.py", "models/folders.py")
"""A checkpoint on disk has a folder."""
ANSWER = (
    "engine/sampling.py",
    "passes/record.py",
    "stores/dynamic.py",
    "stores/sliding.py",
    "stock.py",
    "report.py",
    "errors.py",
)
"""Tokens are chosen, figures are taken, and errors are named."""
NAMES = ("policies/names.py", "policies/specs.py")
"""The names of methods are checked, and their parameters read; these methods have none."""


@contextmanager
def followed(*others: str) -> Iterator[set[str]]:
    """The files of kvkeep whose functions are called within the block, without ``others`` and those above."""
    files, found = set[str](), set[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        names = {name.removeprefix(CORE) for name in files if name.startswith(CORE)}
        any_task = *DATA, *MODULES, *LIBRARY, *MODEL, *CHECKS, *FILES, *ANSWER, *NAMES
        found |= {name for name in names if not name.startswith((*any_task, *others))}


def listed(trip: str) -> set[str]:
    """The files of a trip on the page."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.search(rf"^### {re.escape(trip)}.*?(?=^##)", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return set(re.findall(r"^\d+\. `([\w/]+\.py)`", found[0], re.MULTILINE))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny model whose layers the library runs."""
    load_plugins()
    made = load(saved(tiny("llama"), tmp_path_factory.mktemp("llama")), weights="bfloat16", device="cpu").model
    CacheOptions(budget="64").parse().build(made)  # what a model is asked once
    return made


def test_a_budget_until_an_entry_is_overwritten(model: Any) -> None:
    others = "attention/attend.py", "models/norms.py", "engine/pacing.py"  # of a prompt; and of a text that repeats
    with followed(*others) as files:
        cache = CacheOptions(budget="64", checkpoint="kv").parse().build(model)
        generate(model, None, prompt(1, 60)[0].tolist(), cache, max_new_tokens=7)
    assert files | {"cli/generate.py"} == listed("`kvkeep generate --budget 512`")


def test_a_step_of_draft_and_verify(model: Any) -> None:
    cache = CacheOptions(budget="64", checkpoint="kv", drafts="snapkv").parse().build(model)
    begun = generate(model, None, prompt(1, 100)[0].tolist(), cache, max_new_tokens=2).sequence
    scheduler = Scheduler(model, packed=False)
    products = ("models/fused.py", "models/norms.py", "step/native/steps.py", "attention/portable.py")
    facts = ("registry", "assembly")
    with followed(*products, *(f"policies/{one}.py" for one in facts)) as files:
        scheduled = scheduler.add(Answer(Ask(begun, 20), cache, None, [], None))
        while not scheduled.give(scheduler.step()[0].logits):
            pass
    assert files == listed("A step of `snapkv+verified`: ")
