"""The lab's methods are a plugin: the core knows their names only, to say what to install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kvkeep.errors import UsageError
from kvkeep.plugins import PARTS
from kvkeep.policies.methods import resolve
from kvkeep.policies.names import LAB, check_names
from kvkeep.policies.registry import FATES, PRESETS, RECALLS, SELECTORS

ROOT = Path(__file__).parents[3]

WITHOUT = """
import sys
from kvkeep import plugins
found = plugins.entry_points
plugins.entry_points = lambda **group: [one for one in found(**group) if one.dist.name != "kvkeep-lab"]
from kvkeep.errors import UsageError
from kvkeep.policies.names import LAB, check_names

def refused(ask, spec):
    try:
        ask(spec)
    except UsageError as error:
        return str(error)

print([refused(check_names, spec) for spec in sys.argv[1:]], "torch" in sys.modules)
from kvkeep.policies.methods import names, parts, resolve
print([refused(resolve, spec) for spec in sys.argv[1:]], any(name.startswith("kvkeep_lab") for name in sys.modules))
print({*LAB} & {*names(), *(name for registry in parts().values() for name in registry)})
"""


def test_entry_points_register_exactly_the_names_of_the_lab() -> None:
    points = entry_points(group=PARTS)
    names = [point.name for point in points if point.dist is not None and point.dist.name == "kvkeep-lab"]
    assert {*names} == {*LAB} and len(names) == len(LAB)
    assert {*LAB} <= {*SELECTORS, *FATES, *RECALLS, *PRESETS}
    for name in {*LAB} & {*FATES} & {*PRESETS}:
        assert PRESETS[name].fate is FATES[name] and resolve(name).name == name


def test_the_core_never_names_methods_of_the_lab() -> None:
    # Segments are also what attention reads.
    named = re.compile(rf"""['"`](?:{"|".join({*LAB} - {"segments"})})[:'"`]""")
    files = [path for path in (ROOT / "src").rglob("*.py") if path.name != "names.py"]
    assert files and [str(path) for path in files if named.search(path.read_text(encoding="utf-8"))] == []


def test_without_the_lab_its_methods_say_what_to_install() -> None:
    """Before torch is imported, and by the registry."""
    specs = {"cam:8": "cam", "h2o+lowrank+verified": "lowrank", "lru+redecode:3": "redecode", "h2o+drop": None}
    specs |= {"kvpress:snapkv": "kvpress", "kv-lru": "kv-lru", "lru+missed:8": "fetch-on-miss", "static": "static"}
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *specs], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    said = [
        name and f"'{name}' comes with the lab, which is not installed: pip install ./lab in a clone of kvkeep."
        for name in specs.values()
    ]
    assert done.stdout.splitlines() == [f"{said} False", f"{said} False", "set()"], done.stderr


def test_misspelt_methods_are_refused_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvkeep.policies.registry")
    for spec in ("asymkw", "h2o+lowrnk"):
        with pytest.raises(UsageError, match="did you mean"):
            check_names(spec)
    for spec in ("h2o+redecode:3", "cam:8", "asymkv:sinks=4+verified", "h2o+quantize:4+pages:2"):
        check_names(spec)
