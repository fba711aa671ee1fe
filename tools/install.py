"""Set up a virtual environment with kvkeep in it, and a build of torch that fits the machine.

python tools/install.py FOLDER [--tests]

With --tests it also has the lab, both connectors, and what the tests, ruff and mypy need. Without a GPU it takes
a CPU build of torch: the default one from PyPI brings gigabytes of CUDA. Standard library only.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
TRITON = "triton==3.7.1; sys_platform == 'linux'"  # that of this torch for a GPU; 198 MB, so no extra but gpu has it
USED = ("--editable", ".[serve,gguf]")
CONNECTORS = ("--editable", "connectors/cluster", "--editable", "connectors/vllm")
TESTED = ("--editable", ".[dev]", "--editable", "lab[harness]", *CONNECTORS, TRITON)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LIBRARY = Path(__file__).parents[1] / "src" / "kvkeep" / "native" / "libkvkeep.so"
WITHOUT = (
    "kvkeep uses plain torch operations, about ten times slower; install g++ or clang++ and run the command again."
)


def main() -> None:
    """Install into the folder named on the command line."""
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this file may have any Python
        sys.exit(f"kvkeep needs Python 3.11 or newer; this is {sys.version.split()[0]}. Set PYTHON to a newer one.")
    folder = Path(sys.argv[1])
    python = folder / "bin" / "python"
    if not answers(python, "-m", "pip", "--version"):  # none yet, or one that was interrupted
        print(f"Setting up {folder} ...", flush=True)
        try:
            venv.create(folder, with_pip=True, clear=(folder / "pyvenv.cfg").exists())
        except subprocess.CalledProcessError:
            sys.exit(f"{sys.executable} cannot set up an environment with pip; install its package python3-venv.")
    if not answers(python, "-c", "import torch"):
        print("Installing torch ...", flush=True)
        pip(python, "install", *torch_arguments(python))
    print("Installing kvkeep; its native library is built (some 20 s) ...", flush=True)
    tests = sys.argv[2:] == ["--tests"]
    pip(python, "install", *(TESTED if tests else USED))
    if not LIBRARY.is_file():
        print(f"There is no native library: no C++ compiler was found. {WITHOUT}", flush=True)


def answers(python: Path, *arguments: str) -> bool:
    """Tell whether this Python is there and runs the command without an error."""
    return python.exists() and not subprocess.run([python, *arguments], capture_output=True).returncode


def torch_arguments(python: Path) -> list[str]:
    """Return what to ask pip for: any build beside a GPU or on a Mac, else one for the CPU."""
    if sys.platform != "linux" or has_gpu():
        return [TORCH]
    return [TORCH] if default_is_cpu(python) else [TORCH, "--index-url", CPU_INDEX]


def has_gpu() -> bool:
    """Tell whether NVIDIA's driver answers."""
    smi = shutil.which("nvidia-smi")
    return smi is not None and not subprocess.run([smi, "-L"], capture_output=True).returncode


def default_is_cpu(python: Path) -> bool:
    """Tell whether pip's own index offers a CPU build (a local index may); nothing is installed."""
    options = ["--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-"]
    done = subprocess.run([python, "-m", "pip", "install", *options, TORCH], capture_output=True, text=True)
    if done.returncode:
        return False
    files = [item["download_info"]["url"].rsplit("/", 1)[-1] for item in json.loads(done.stdout)["install"]]
    return any(file.startswith("torch-") and "cpu" in file for file in files)


def pip(python: Path, *arguments: str) -> None:
    """Run pip quietly; its errors end the program."""
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"]
    if subprocess.run(command).returncode:
        sys.exit("pip could not install what is needed; its message is above.")


if __name__ == "__main__":
    main()
