"""Set up a virtual environment with kvkeep in it, and a build of torch that fits the machine.

Standard library only. Without a GPU a CPU build is taken: the default one from PyPI brings gigabytes of CUDA.
"""

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    """Install into the folder named on the command line."""
    if sys.version_info < (3, 11):
        sys.exit(f"kvkeep needs Python 3.11 or newer; this is {sys.version.split()[0]}. Set PYTHON=python3.11 (or newer).")
    folder = Path(sys.argv[1])
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"Setting up {folder} ...", flush=True)
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        print("Installing torch ...", flush=True)
        pip(python, "install", *torch_arguments(python))
    print("Installing kvkeep ...", flush=True)
    pip(python, "install", "--editable", ".[dev]")


def torch_arguments(python: Path) -> list[str]:
    """Return what to ask pip for: any build beside a GPU or on a Mac, else one for the CPU."""
    if sys.platform != "linux" or has_gpu():
        return [TORCH]
    return [TORCH] if default_is_cpu(python) else [TORCH, "--index-url", CPU_INDEX]


def has_gpu() -> bool:
    """Tell whether NVIDIA's driver answers."""
    return shutil.which("nvidia-smi") is not None and not subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True
    ).returncode


def default_is_cpu(python: Path) -> bool:
    """Tell whether pip's own index offers a CPU build (a local index may); nothing is installed."""
    command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", TORCH]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return False
    items = json.loads(done.stdout)["install"]
    return any(item["metadata"]["name"] == "torch" and "cpu" in item["download_info"]["url"].rsplit("/", 1)[-1] for item in items)


def pip(python: Path, *arguments: str) -> None:
    """Run pip quietly; its errors end the program."""
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"]
    if subprocess.run(command).returncode:
        sys.exit("pip could not install what is needed; its message is above.")


if __name__ == "__main__":
    main()
