"""What is listed of vLLM is what is used of it; whether vLLM has it is a test in its own environment (test_engine)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import kvkeep_vllm
from kvkeep_vllm import pinned

SOURCES = {
    path.name: path.read_text(encoding="utf-8")
    for path in Path(kvkeep_vllm.__file__).parent.glob("*.py") if path.name != "pinned.py"
}  # fmt: skip
KNOWN_OTHERWISE = {"vllm.platforms:current_platform"}  # an instance of Platform, which is listed


def test_all_that_is_imported_is_listed() -> None:
    found = {
        f"{node.module}:{alias.name}"
        for text in SOURCES.values() for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
        for alias in node.names
    }  # fmt: skip
    listed = {*pinned.FIELDS, *pinned.CALLS}
    assert found and {name for name in found - KNOWN_OTHERWISE if name not in listed} == set()


def test_all_that_is_listed_is_used() -> None:
    text = "\n".join(SOURCES.values())
    listed = {word for fields in pinned.FIELDS.values() for word in fields.split()}
    listed |= {name.rpartition(".")[2].rpartition(":")[2] for name in pinned.CALLS} - {"__init__"}
    inherited = {"_set_isa_to_layers"}  # by which a layer has its ``isa``
    assert {word for word in listed - inherited if not re.search(rf"\b{word}\b", text)} == set()
    own = {"_space", "_bad", "_idle", "_transfers"}
    base = set(re.findall(r"self\.(_[a-z]\w*)", SOURCES["connector.py"].partition("class _Work")[0])) - own
    assert base <= listed, base - listed
