"""The words of the code: no identifier of a list that a new colleague would not guess, and one name for one thing.

Packages that still have such identifiers have a number here, which may only become smaller.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONNECTORS = ("connectors/cluster/src/kvkeep_cluster", "connectors/vllm/src/kvkeep_vllm")
SOURCES = ("src/kvkeep", "lab/src/kvkeep_lab", *CONNECTORS)
BANNED = frozenset(
    [
        "alike",
        "alone",
        "asked",
        "behind",
        "door",
        "freed",
        "front",
        "go_on",
        "held",
        "hide",
        "lasting",
        "look",
        "most",
        "own",
        "quiet",
        "room",
        "sees",
        "together",
        "told",
        "took",
        "whole",
    ]
)
LEFT: dict[str, int] = {
    "kvkeep_lab": 3,
    "kvkeep_lab/published": 5,
    "kvkeep_lab/studies": 5,
}
"""Banned identifiers that a package still defines, at most."""
SAME_NAME = 0
"""Public classes that have the name of another one, at most."""


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """The package and the tree of every module; modules of a distribution's top level are one package."""
    found = []
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            inside = path.relative_to(ROOT / source).parts
            found.append(("/".join([Path(source).name, *inside[:-1][:1]]), ast.parse(path.read_text("utf-8"))))
    return found


def defined(node: ast.AST) -> str:
    """The identifier that a node defines, without underscores around it; empty: it defines none."""
    name = ""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        name = node.name
    elif isinstance(node, ast.arg):
        name = node.arg
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        name = node.id if isinstance(node, ast.Name) else node.attr
    return name.strip("_").lower()


def test_no_identifier_is_a_word_that_a_colleague_would_not_guess() -> None:
    found = Counter(package for package, tree in modules() for node in ast.walk(tree) if defined(node) in BANNED)
    assert found <= Counter(LEFT), f"more than before: {found - Counter(LEFT)}"
    assert found == Counter(LEFT), f"fewer than before, so lower LEFT: {dict(sorted(found.items()))}"


def native_sources() -> Iterator[tuple[str, str]]:
    """The name and the text of every C and C++ source."""
    for folder in ("src/kvkeep/native", "tests/native"):
        for path in sorted((ROOT / folder).iterdir()):
            if path.suffix in (".h", ".cpp"):
                yield path.name, path.read_text("utf-8")


def test_identifiers_of_the_native_library_are_of_the_same_words() -> None:
    """Parts of an identifier, between its underscores, count as well."""
    found = Counter[tuple[str, str]]()
    for name, text in native_sources():
        code = re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', " ", text, flags=re.DOTALL)
        for word in re.findall(r"[A-Za-z_]\w*", code):
            parts = {word.lower().strip("_"), *word.lower().split("_")}
            found.update((name, word) for banned in BANNED & parts if banned)
    assert not found


def test_lines_of_the_native_library_have_at_most_120_columns() -> None:
    found = [
        f"{name}:{number}"
        for name, text in native_sources()
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > 120
    ]
    assert not found


def test_two_public_classes_have_two_names() -> None:
    places = defaultdict[str, list[str]](list)
    for package, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(package)
    same = {name: where for name, where in places.items() if len(where) > 1}
    assert sum(len(where) - 1 for where in same.values()) == SAME_NAME, same
