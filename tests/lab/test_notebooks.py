"""The notebooks run from the first cell to the last, on the real model, and print what is stored in them."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvkeep.errors import ModelError
from kvkeep.models.loading import load

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TOOL = importlib.util.spec_from_file_location("notebooks", ROOT / "tools/notebooks.py")
NUMBER = re.compile(r"\d+(\.\d+)?e[-+]\d+|\d+\.\d+| +")
"""Figures that rounding may change, and the blanks that fill a column."""


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def cells(path: Path, kind: str) -> list[Any]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == kind]


def printed(outputs: list[Any]) -> str:
    """What a cell prints, and the text of its value; without the figures that rounding may change."""
    lines = [line for one in outputs for line in one.get("text", one.get("data", {}).get("text/plain"))]
    return NUMBER.sub("#", "".join(lines))


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_stored(
    path: Path, registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TOOL is not None and TOOL.loader is not None
    tool = importlib.util.module_from_spec(TOOL)
    TOOL.loader.exec_module(tool)
    if path.stem != "1_exact_chat":
        pytest.importorskip("matplotlib")
    try:
        load("smollm2", device="cpu")
    except ModelError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    stored = [printed(cell["outputs"]) for cell in cells(path, "code")]
    assert [printed(outputs) for outputs in tool.run(read(path))] == stored


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1_exact_chat", ["blue elephant", "the two answers are equal: True", "effective='kv-direct'"]),
        ("2_compare_methods", ["3 passages of 48 tokens", "kv-direct at 50%   match 100%", "window at 50%"]),
        (
            "3_new_selector",
            ["effective='large-values:newest=8+checkpoint'", "large-values+checkpoint", "match 100%   exact"],
        ),
    ],
)
def test_what_is_stored_shows_what_the_text_says(name: str, expected: list[str]) -> None:
    outputs = [one for cell in cells(ROOT / f"notebooks/{name}.ipynb", "code") for one in cell["outputs"]]
    text = "".join("".join(one.get("text", "")) for one in outputs)
    assert all(words in text for words in expected), text
    assert not re.search(r"/(home|tmp|root|work|usr)/|\d s\b|tokens/s", text), "a path or a time of one machine"
    pictures = [one["data"]["image/png"] for one in outputs if "image/png" in one.get("data", {})]
    assert len(pictures) == (name == "2_compare_methods")
    assert all(base64.b64decode(picture)[1:4] == b"PNG" and len(picture) < 150_000 for picture in pictures)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_executed_and_its_links_lead_somewhere(path: Path) -> None:
    made = read(path)
    assert (made["nbformat"], len({cell["id"] for cell in made["cells"]})) == (4, len(made["cells"]))
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert "git clone" in "".join(code[0]["source"])  # kvkeep is on no index
    text = "\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    for target in re.findall(r"\]\(([^)#:]+)#?[^)]*\)", text):
        assert (path.parent / target).exists(), target
