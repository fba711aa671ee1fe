"""Try kvkeep with the lowest versions that pyproject.toml allows, in an environment of its own. Standard library only.

python tools/versions.py FOLDER [TEST ...]

FOLDER keeps the environment, and takes 7 GB where pip's index has no CPU build of that torch. TEST: arguments of
pytest instead of a twelfth of the cases of the parts and of the command line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from install import CPU_INDEX, answers, pip

ROOT = Path(__file__).parents[1]
EXTRAS = ("cli", "gguf")
LOWEST = re.compile(r"([\w-]+)>=([\w.]+)")
TESTS = [
    "--part",
    "quick",
    "--deselect=tests/cli/test_cli.py::test_help_needs_neither_torch_nor_transformers",  # and the lab
    *(f"tests/{name}" for name in ("attention", "memory", "policies", "stores", "decode")),
    *(f"tests/cli/test_{name}.py" for name in ("cli", "demo_command")),
]
SAY = "import sys, torch, transformers as t; print('Python', sys.version.split()[0], torch.__version__, t.__version__)"


def main() -> None:
    """Install and test; whatever fails ends the program."""
    folder, tests = Path(sys.argv[1]), sys.argv[2:] or TESTS
    wanted = lowest()
    python = folder / "bin" / "python"
    if not answers(python, "-m", "pip", "--version"):
        venv.create(folder, with_pip=True)
    print("Installing", *wanted, "...", flush=True)
    torch = next(one for one in wanted if one.startswith("torch=="))
    if not answers(python, "-c", f"from importlib.metadata import version; assert version('torch') >= '{torch[7:]}'"):
        index = ["--index-url", CPU_INDEX, "--retries", "0", "--timeout", "15"]
        if not answers(python, "-m", "pip", "install", "--quiet", torch, *index):
            print("There is no CPU build of it within reach; taking that of pip's index.", flush=True)
    pip(python, "install", "--no-compile", *wanted, "pytest", "hypothesis")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for command in (["-c", SAY], ["-m", "pytest", *tests]):
        done = subprocess.run([python, *command], cwd=ROOT, env=environment)
        if done.returncode:
            sys.exit(done.returncode)


def lowest() -> list[str]:
    """Return what kvkeep and its commands need, each in its lowest version; raises ValueError where it has none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needs = [*project["dependencies"], *(need for name in EXTRAS for need in project["optional-dependencies"][name])]
    found = [LOWEST.match(need) for need in needs]
    if None in found:
        raise ValueError(f"no lowest version in one of {', '.join(needs)}")
    return [f"{one[1]}=={one[2]}" for one in found if one is not None]


if __name__ == "__main__":
    main()
