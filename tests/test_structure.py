"""What others build upon: the names that kvkeep exports, and which parts go together."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from cases import TURN
from families import tiny
from helpers import prompt, step

import kvkeep
from kvkeep import KeepCache, UsageError
from kvkeep.policies import registry
from kvkeep.policies.methods import combined, parts, resolve
from kvkeep.policies.registry import Evicted, Method
from kvkeep.policies.specs import required

ROOT = Path(__file__).parents[1]


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
        assert named <= {*kvkeep.__all__, *rooms, "commands", "parts", "cluster", "md", "git", "service", "h"}, (
            page.name
        )


@pytest.mark.parametrize("module", ["kvkeep", "kvkeep_vllm", "kvkeep_cluster.proxy"])
def test_importing_it_imports_neither_torch_nor_transformers(module: str) -> None:
    """They take seconds; a name brings in what it needs when it is first asked for. The front is in processes that have
    no model."""
    slow = "{'torch', 'transformers', 'typer', 'vllm', 'ray'}"
    code = f"import sys, kvkeep, {module}; kvkeep.UsageError; print(sorted({slow} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_ray_is_started_in_one_place() -> None:
    """And by no module of kvkeep, which names neither Ray nor S3."""
    folders = ("src", "lab/src", "connectors/cluster/src", "connectors/vllm/src")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    text = {path: path.read_text(encoding="utf-8") for path in files}
    assert [path.name for path, own in text.items() if re.search(r"\bray\.init\(", own)] == ["ray_cluster.py"]
    names = re.compile(r"\bray\b|\bRay\b|\bS3\b|\bs3\b|fsspec")
    assert not [path for path, own in text.items() if path.is_relative_to(ROOT / "src") and names.search(own)]


# -- parts ------------------------------------------------------------------------------------------------


def combinations() -> Iterator[Method]:
    """Every selector with every fate and every recall, and every preset with every recall, allowed or not."""
    known = parts()
    recalls = {"": Evicted} | known["recalls"]
    for name, recall in recalls.items():
        tail = f"+{name}" if name else ""
        for selector, fate in itertools.product(known["selectors"], known["fates"]):
            if not required(known["selectors"][selector]):
                chosen = known["selectors"][selector](), known["fates"][fate](), recall()
                yield combined(f"{selector}+{fate}{tail}", *chosen)
        for preset in registry.PRESETS:
            yield replace(resolve(preset), name=preset + tail, **({"recall": recall()} if name else {}))


@pytest.mark.slow
def test_every_combination_works_or_says_why_not() -> None:
    """All of about 1,200 are resolved; a twelfth of those that work read a text."""
    refused, taken = 0, []
    for made in combinations():
        first, _, recall = made.name.partition("+")
        preset = registry.PRESETS.get(first) if recall else None
        own = preset is not None and bool(preset.recall.label)  # whatever would be refused besides
        own = own and (preset.closed or type(made.recall) is not type(preset.recall))
        reason = None if own else made.refusal()
        if reason is None and not own:
            taken.append(made.name)
            continue
        why = f". {reason}" if reason else f": '{first}' is a method of its own, without another recall."
        assert why.endswith(".") and ". " not in why[2:] and len(why.split()) > 5, why
        with pytest.raises(UsageError) as error:
            resolve(made.name)
        assert str(error.value) == f"'{made.name}' is not understood{why}"
        refused += 1
    assert refused and len(taken) > 500
    model = tiny("llama", positions=4096)  # 'endless' refuses a model with fewer positions than its blocks need
    for spec in taken[TURN % 12 :: 12]:
        method = resolve(spec)
        budget = 201 if method.budgeted and method.selector.keeps_all else 170  # a static cache holds the whole text
        given = {
            name: size
            for name, size in (("budget", budget), ("chunk", 32))
            if name in method.options and method.budgeted
        }
        cache = KeepCache(model, spec, **given)
        for low, high in ((0, 200), (200, 201)):
            assert step(model, cache, prompt(1, 201)[:, low:high]).isfinite().all(), spec


# -- classes ----------------------------------------------------------------------------------------------


def parsed(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    """The modules in some folders."""
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_no_class_has_more_than_thirty_methods() -> None:
    large = {
        node.name
        for _, module in parsed("src")
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
        and sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body) > 30
    }
    assert not large, "split it by what its parts know"


def test_nothing_is_assigned_to_a_stream_or_its_record_from_outside() -> None:
    """They have methods with names of what happens."""
    for path, module in parsed("src", "lab/src", "connectors"):
        for node in ast.walk(module):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in (
                one for given in targets for one in (given.elts if isinstance(given, ast.Tuple) else [given])
            ):
                owner = target.value if isinstance(target, ast.Attribute) else None
                assert getattr(owner, "attr", "") not in ("stream", "record"), f"{path}:{target and target.lineno}"


# -- imports ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "package",
    ["src/kvkeep", "lab/src/kvkeep_lab", "connectors/vllm/src/kvkeep_vllm", "connectors/cluster/src/kvkeep_cluster"],
)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    """Imports for type checkers included. ``graphlib`` raises CycleError with the circle."""
    root = ROOT / package
    parts = {path: path.relative_to(root.parent).with_suffix("").parts for path in root.rglob("*.py")}
    modules = {".".join(name[:-1] if name[-1] == "__init__" else name): path for path, name in parts.items()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = graph.setdefault(module, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{one.name}" for one in node.names} & {*modules}
                found |= inner or {node.module} & {*modules}
    assert len([*TopologicalSorter(graph).static_order()]) == len(modules)
