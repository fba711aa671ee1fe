"""A wheel has every file that the code reads: files that are no modules are named in the project's package data."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("project", "package"), [("lab", "kvkeep_lab"), (".", "kvkeep")])
def test_package_data_are_all_files_that_are_no_modules(project: str, package: str) -> None:
    found = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["tool"]["setuptools"]
    folder = ROOT / project / found["packages"]["find"]["where"][0] / package
    ignored = {".py", ".pyc"}
    there = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in ignored}
    named = {glob: set(folder.glob(glob)) for glob in found["package-data"][package]}
    assert all(named.values()), "a glob that matches nothing"
    assert there == set().union(*named.values())
