"""Run the notebooks and store what their cells print and draw: ``python tools/notebooks.py``.

Cells run as Python in this process, in an empty folder; lines of a notebook alone (%pip, !git) are left out.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parents[1] / "notebooks"


class Image:
    """Stands in for ``IPython.display.Image``: a PNG file."""

    def __init__(self, path: str) -> None:
        self.data = {"image/png": base64.b64encode(Path(path).read_bytes()).decode()}

    def __repr__(self) -> str:
        return "<IPython.core.display.Image object>"


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the outputs of every code cell, as the format of notebooks has them. Files are written to the current
    folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    sys.modules["IPython.display"] = SimpleNamespace(Image=Image)  # type: ignore[assignment]
    cells = ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    return [_outputs(source, number, names) for number, source in enumerate(cells, 1)]


def _outputs(source: str, number: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    found: list[dict[str, Any]] = []
    if text := printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {**getattr(value, "data", {}), "text/plain": [repr(value)]}
        found.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return found


def main() -> None:
    """Run every notebook, and write it with its outputs."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            outputs = run(notebook)
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, (cell, found) in enumerate(zip(code, outputs, strict=True), 1):
            cell |= {"execution_count": number, "outputs": found}
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + os.linesep, encoding="utf-8")
        print(f"{path.name}: {sum(map(len, outputs))} outputs")


if __name__ == "__main__":
    main()
