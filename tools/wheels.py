"""Build the wheels of both packages, and try each alone: in a fresh environment, in a folder called ``kvkeep``, where
nothing but the wheel has the name. Standard library only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from install import pip, torch_arguments

ROOT = Path(__file__).parents[1]
TRIES = {
    "kvkeep[cli,gguf]": (["methods"], ["models"], ["generate", "-p", "Hello", "-n", "3", "-b", "32"]),
    "kvkeep-lab": (["lab", "list"], ["bench", "--contexts", "256", "--rounds", "1", "--only", "full", "--no-slow"]),
}
"""Commands of each package that are run; all of its commands are asked for their help before."""
LISTED = {"kvkeep[cli,gguf]": "from kvkeep.cli import COMMANDS", "kvkeep-lab": "from kvkeep_lab.cli import COMMANDS"}


def main() -> None:
    """Build, install and run; whatever fails ends the program."""
    with tempfile.TemporaryDirectory() as temporary:
        wheels, home = Path(temporary, "wheels"), Path(temporary, "kvkeep")
        projects = [copied(ROOT / name, Path(temporary, "sources", name)) for name in ("lab", "")]
        pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(wheels), *projects)
        venv.create(home / ".venv", with_pip=True)
        python = home / ".venv" / "bin" / "python"
        pip(python, "install", *torch_arguments(python))
        for package, commands in TRIES.items():
            print(f"Trying {package} ...", flush=True)
            pip(python, "install", "--find-links", str(wheels), package)
            listed = run(home, str(python), "-c", f"{LISTED[package]}; print(*COMMANDS)").split()
            for command in ([], *([name] for name in listed)):
                run(home, str(python.with_name("kvkeep")), *command, "--help")
            for command in commands:
                run(home, str(python.with_name("kvkeep")), *command)


def copied(project: Path, folder: Path) -> str:
    """Copy what a wheel is made of: a build leaves files beside its sources, and takes up what others left there."""
    shutil.copytree(project / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (project / name).exists():
            shutil.copy(project / name, folder)
    return str(folder)


def run(folder: Path, *command: str) -> str:
    """Return what a command prints; one that fails ends the program."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} left with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
