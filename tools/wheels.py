"""Build source distributions of all packages and wheels from these, and try each wheel alone: in a fresh environment
without any compiler, in a folder called ``kvkeep``, where nothing but the wheel has the name. Needs the package
``build``, and a C++ compiler.

python tools/wheels.py [FOLDER]

FOLDER: where the files go that are to be released, once all of it has worked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from install import pip, torch_arguments

ROOT = Path(__file__).parents[1]
PROJECTS = ("lab", "connectors/cluster", "connectors/vllm", "")
TRIES = {
    "kvkeep[cli,gguf]": (["--version"], ["methods"], ["models"], ["demo"]),
    "kvkeep-cluster": (["serve", "--help"],),
    "kvkeep-lab": (["lab", "list"], ["bench", "--contexts", "256", "--rounds", "1", "--only", "full", "--no-slow"]),
}
"""Commands of each package that are run; all of its commands are asked for their help before."""
MODULES = {"kvkeep[cli,gguf]": "kvkeep.cli", "kvkeep-cluster": "kvkeep.cli", "kvkeep-lab": "kvkeep_lab.cli"}
VLLM = "import kvkeep_vllm, kvkeep_vllm.codec, kvkeep_vllm.identity, kvkeep_vllm.loader, kvkeep_vllm.options"
"""What is imported of the connector for vLLM; the rest of it needs vLLM."""
HELP = """
import sys
from importlib import import_module
from kvkeep.cli import main
for name in import_module(sys.argv[1]).COMMANDS:
    sys.argv = ["kvkeep", name, "--help"]
    try:
        main()
    except SystemExit as left:
        if left.code:
            sys.exit(f"kvkeep {name} --help left with {left.code}")
"""
"""All help in one process: a module that is missing is missing there, too."""
TOOLS = ("cat", "cp", "dirname", "env", "ls", "mkdir", "mv", "rm", "sh", "stty", "uname")
"""What is on the path besides the environment's own programs."""
LIBRARY = """
from kvkeep.native.library import TORCH, path
assert path() != TORCH, "the wheel's native library is not used"
print(f"  the native library's path here: {path()}")
"""


def main() -> None:
    """Build, install and run; whatever fails ends the program."""
    with tempfile.TemporaryDirectory() as temporary:
        built, home = Path(temporary, "dist"), Path(temporary, "kvkeep")
        for name in PROJECTS:
            project = copied(ROOT / name, Path(temporary, "sources", name))
            run(ROOT, sys.executable, "-m", "build", "--outdir", str(built), project)
        venv.create(home / ".venv", with_pip=True)
        python = home / ".venv" / "bin" / "python"
        pip(python, "install", "--no-compile", *torch_arguments(python))  # most modules are never imported
        path = f"{python.parent}{os.pathsep}{linked(home / 'tools')}"
        for package, commands in TRIES.items():
            print(f"Trying {package} without a compiler ...", flush=True)
            pip(python, "install", "--no-compile", "--only-binary", "kvkeep", "--find-links", str(built), package)
            print(run(home, str(python), "-c", LIBRARY, path=path), end="", flush=True)
            run(home, str(python), "-c", HELP, MODULES[package], path=path)
            for command in (["--help"], *commands):
                run(home, str(python.with_name("kvkeep")), *command, path=path)
        pip(python, "install", "--no-compile", "--no-index", "--find-links", str(built), "kvkeep-vllm")
        run(home, str(python), "-c", VLLM, path=path)
        if sys.argv[1:]:
            shutil.copytree(built, sys.argv[1], dirs_exist_ok=True)


def copied(project: Path, folder: Path) -> str:
    """Copy what a wheel is made of: a build leaves files beside its sources, and takes up what others left there."""
    shutil.copytree(project / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt"):
        if (project / name).exists():
            shutil.copy(project / name, folder)
    if (project / "cmake").exists():
        shutil.copytree(project / "cmake", folder / "cmake", ignore=shutil.ignore_patterns("editable"))
    return str(folder)


def linked(folder: Path) -> Path:
    """Fill a folder with links to a few programs of the system, no compiler among them, and return it."""
    folder.mkdir()
    for name in TOOLS:
        if (found := shutil.which(name)) is not None:
            (folder / name).symlink_to(found)
    return folder


def run(folder: Path, *command: str, path: str | None = None) -> str:
    """Return what a command prints; one that fails ends the program. What it imports is compiled once for all. path:
    where programs are found, by default as here."""
    hidden = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {} if path is None else {"PATH": path}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)} left with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
