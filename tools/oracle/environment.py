"""Where llama.cpp is: its sources, and a Python that has ``llama-cpp-python``, both made of one source distribution."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "0.3.36"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Environment:
    """llama.cpp of one source distribution of ``llama-cpp-python``."""

    python: Path
    """A Python with ``llama_cpp``, built from this distribution."""
    sources: Path
    """The folder of llama.cpp, which has the converter and ``src/llama-vocab.cpp``."""

    def ask(self, requests: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """What llama.cpp answers to each request of ``llama.py``; where it ends the process, that is the error."""
        left, answers = [json.dumps(one) for one in requests], []
        while left:
            command = [str(self.python), str(HERE / "llama.py")]
            environment = os.environ | {"GGML_NO_BACKTRACE": "1"}
            done = subprocess.run(command, input="\n".join(left), capture_output=True, text=True, env=environment)
            found = [json.loads(line) for line in done.stdout.splitlines()]
            if done.returncode:
                last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                found.append({"error": f"llama.cpp ends the process: {last.rpartition('/')[2]}"})
            answers += found
            left = left[len(found) :]
        return answers

    def convert(self, folders: dict[Path, Path]) -> dict[Path, str | None]:
        """Convert transformers folders to GGUF files. Returns, for each file, why it failed, or None."""
        request = json.dumps({str(folder): str(out) for folder, out in folders.items()})
        answered = json.loads(_run([sys.executable, str(HERE / "converting.py"), str(self.sources)], request))
        return {Path(out): failed for out, failed in answered.items()}


def found(work: Path) -> Environment:
    """The environment in ``work``, made if it is not there, which takes minutes."""
    sources = work / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    python = work / "venv" / "bin" / "python"
    if not python.is_file():
        venv.create(work / "venv", with_pip=True)
    if not sources.is_dir():
        print(f"fetching the source distribution of llama-cpp-python {VERSION} from PyPI into {work}", flush=True)
        _pip(
            python, "download", "--no-deps", "--no-binary=llama-cpp-python", f"llama-cpp-python=={VERSION}", "-d", work
        )
        with tarfile.open(work / f"llama_cpp_python-{VERSION}.tar.gz") as packed:
            packed.extractall(work, filter="data")
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode:
        print(f"building it in {work / 'venv'}, which takes minutes", flush=True)
        _pip(python, "install", work / f"llama_cpp_python-{VERSION}")
    return Environment(python, sources)


def _pip(python: Path, *what: str | Path) -> None:
    parallel = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())}
    subprocess.run([python, "-m", "pip", "--quiet", *what], check=True, env=os.environ | parallel)


def _run(command: list[str], given: str) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout
