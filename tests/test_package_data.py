"""A wheel has every file that the code reads: the lab names files that are no modules in its package data, and kvkeep's
own wheel takes all files but the native library's sources, except their header, which Python reads."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODULES = {".py", ".pyc"}


def tools(project: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / project / "pyproject.toml").read_text())["tool"]


def data(folder: Path) -> set[Path]:
    """The files below a folder that are no modules."""
    return {path for path in folder.rglob("*") if path.is_file() and path.suffix not in MODULES}


def test_the_labs_package_data_are_all_files_that_are_no_modules() -> None:
    found = tools("lab")["setuptools"]
    folder = ROOT / "lab" / found["packages"]["find"]["where"][0] / "kvkeep_lab"
    named = {glob: set(folder.glob(glob)) for glob in found["package-data"]["kvkeep_lab"]}
    assert all(named.values()), "a glob that matches nothing"
    assert data(folder) == set().union(*named.values())


def test_a_wheel_of_kvkeep_leaves_out_sources_of_the_native_library_alone() -> None:
    found = tools(".")["scikit-build"]["wheel"]
    folder = ROOT / found["packages"][0]
    assert found["exclude"] == ["**.cpp", "**.h", "!**/kvkeep.h"]
    left_out = {path for path in data(folder) if path.suffix in (".cpp", ".h") and path.name != "kvkeep.h"}
    assert left_out and {path.parent for path in left_out} == {folder / "native"}
    kept = {path.relative_to(folder).as_posix() for path in data(folder) - left_out}
    assert {"py.typed", "native/kvkeep.h", "cli/demo.txt", "policies/papers.toml", "serve/page/index.html"} <= kept
