"""The notebooks run from the first cell to the last, on the real model, and are stored without outputs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.errors import ModelError
from kvkeep.models.loading import load

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[str]:
    made: Any = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in made if cell["cell_type"] == kind]


@pytest.fixture(scope="module")
def loaded() -> Any:
    try:
        return load("smollm2", device="cpu")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("1_exact_chat", ["blue elephant", "the two answers are equal: True", "effective='kv-direct'"]),
        ("2_compare_methods", ["3 passages of 48 tokens", "kv-direct at 50%   match 100%", "window at 50%"]),
        (
            "3_new_selector",
            ["effective='large-values:newest=8+checkpoint'", "large-values+checkpoint", "match 100%   exact"],
        ),
    ],
)
def test_a_notebook_runs(
    name: str, said: list[str], loaded: Any, registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Its code, cell by cell, as Python; what only a notebook knows (%pip, pictures) does nothing."""
    if name != "1_exact_chat":
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvkeep.models.loading.load", {"smollm2": loaded}.get)  # once for all
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(Image=Path))
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(cells(FOLDER / f"{name}.ipynb", "code")):
        plain = re.sub(r"^(\s*)%.*$", r"\1pass", code, flags=re.MULTILINE)
        exec(compile(plain, f"{name}[{number}]", "exec", dont_inherit=True), names)
    printed = capsys.readouterr().out
    assert all(words in printed for words in said), printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_its_links_lead_somewhere(path: Path) -> None:
    made = json.loads(path.read_text(encoding="utf-8"))
    assert (made["nbformat"], len({cell["id"] for cell in made["cells"]})) == (4, len(made["cells"]))
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in made["cells"] if "outputs" in cell)
    assert cells(path, "code")[0].count("%pip install") == 2  # the line that runs, and what to do before PyPI has it
    for target in re.findall(r"\]\(([^)#:]+)#?[^)]*\)", "\n".join(cells(path, "markdown"))):
        assert (path.parent / target).exists(), target
