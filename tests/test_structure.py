"""What others build upon: the names that kvkeep exports, parts that are added, which of them go together, and that
imports go one way."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from families import tiny
from helpers import prompt, step

import kvkeep
from kvkeep import KeepCache, Selector, UsageError
from kvkeep.policies import registry
from kvkeep.policies.methods import parts, resolve

ROOT = Path(__file__).parents[1]
ORDER = (
    *("errors", "extras", "geometry", "files", "budget", "models", "attention", "memory", "contracts", "stores"),
    *("policies", "passes", "stream", "report", "transfer", "cache", "stock", "decode", "plan", "cli", "__main__"),
)
"""The rooms of src/kvkeep: each imports only from those before it."""


# -- names ------------------------------------------------------------------------------------------------


def test_every_exported_name_is_there_and_listed_in_order() -> None:
    assert sorted(kvkeep.__all__) == kvkeep.__all__ == sorted(kvkeep._HOME_OF)
    assert dir(kvkeep) == sorted([*kvkeep.__all__, "__version__"])
    for name in kvkeep.__all__:
        assert getattr(kvkeep, name).__module__.startswith("kvkeep."), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvkeep.nothing  # noqa: B018


def test_pages_name_what_is_exported() -> None:
    rooms = {path.stem for path in (ROOT / "src" / "kvkeep").iterdir()}
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        named = set(re.findall(r"\bkvkeep\.([A-Za-z]\w*)", page.read_text(encoding="utf-8")))
        assert named <= {*kvkeep.__all__, *rooms, "parts", "md", "git"}, page.name


def test_importing_kvkeep_imports_neither_torch_nor_transformers() -> None:
    """They take seconds; a name brings in what it needs when it is first asked for."""
    code = "import sys, kvkeep; kvkeep.UsageError; print(sorted({'torch', 'transformers', 'typer'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# -- imports ----------------------------------------------------------------------------------------------


def imported(tree: ast.Module) -> Iterator[str]:
    """The rooms that a module imports from, but those it names in annotations alone."""
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in unseen:
            names = [node.module or ""] if node.module != "kvkeep" else [f"kvkeep.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("kvkeep."))
        assert not any(name.startswith("kvkeep_lab") for name in names), "the lab is another package"


def test_imports_go_one_way() -> None:
    root = ROOT / "src" / "kvkeep"
    for path in root.rglob("*.py"):
        own = path.relative_to(root).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in ORDER, f"'{own}' has no place in the order of rooms"
        for room in imported(ast.parse(path.read_text(encoding="utf-8"))):
            assert ORDER.index(room) <= ORDER.index(own), f"{path.relative_to(root)} imports from '{room}'"


# -- parts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EverySecond(Selector):
    """Odd slots leave first."""

    leaves: ClassVar[str] = "odd slots"
    source: ClassVar[str] = "tests/test_structure.py"

    def rank(self, entries):  # type: ignore[no-untyped-def]
        return -(entries.slots % 2)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(registry.SELECTORS, "every-second", EverySecond)  # which is undone
    del registry.SELECTORS["every-second"]
    kvkeep.register("every-second", EverySecond)
    return "every-second"


def test_a_registered_selector_is_a_method_like_any_other(added: str) -> None:
    assert kvkeep.methods()[added].leaves == "odd slots" and parts()["selectors"][added] is EverySecond
    for spec in (added, f"{added}+quantize:4", f"{added}+verified"):
        cache = KeepCache(tiny("llama"), spec, 100)
        step("llama", cache, prompt(1, 140))
        if spec == added:
            assert all(states[..., ::2].all() for states in cache.entry_states())
    kvkeep.register(added, EverySecond)  # the same again


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("h2o", EverySecond, "another part already"),
        ("full", EverySecond, "another part already"),
        ("two+names", EverySecond, "cannot be the name"),
        ("", EverySecond, "cannot be the name"),
        ("some", dict, "no selector, fate, recall or preset"),
        ("some", EverySecond(), "no selector, fate, recall or preset"),
    ],
)
def test_what_cannot_be_registered_is_said(name: str, part: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        kvkeep.register(name, part)  # type: ignore[arg-type]
    assert name not in ("two+names", "", "some") or name not in kvkeep.methods()


def specs() -> Iterator[str]:
    """Every selector with every fate and every recall, and every preset with every recall."""
    known = parts()
    for recall in ("", *known["recalls"]):
        tail = f"+{recall}" if recall else ""
        for selector in known["selectors"]:
            if selector != "kvpress":  # which is none without the name of a press
                yield from (f"{selector}+{fate}{tail}" for fate in known["fates"])
        yield from (f"{preset}{tail}" for preset in registry.PRESETS)


def test_every_combination_works_or_says_why_not() -> None:
    """Of about 700; some read a text."""
    refused, taken = {}, []
    for spec in specs():
        try:
            resolve(spec)
        except UsageError as error:
            refused[spec] = str(error)
            continue
        taken.append(spec)
    for spec, reason in refused.items():
        assert reason.startswith(f"'{spec}' is not understood") and reason.endswith("."), reason
        why = reason.partition("is not understood")[2].lstrip(".: ")
        assert ". " not in why and len(why.split()) > 5, reason
    assert len(refused) < len(taken) > 400
    for number, spec in enumerate(taken):
        method = resolve(spec)
        given = {
            name: size for name, size in (("budget", 170), ("chunk", 32)) if name in method.options and method.budgeted
        }
        cache = KeepCache(tiny("llama"), spec, **given)
        if number % 17 == 0:
            for low, high in ((0, 200), (200, 201)):
                assert step("llama", cache, prompt(1, 201)[:, low:high]).isfinite().all(), spec
