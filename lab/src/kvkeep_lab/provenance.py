"""The provenance of results: the version of kvkeep, its commit if known, and the conditions of a measurement."""

from __future__ import annotations

import json
import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import kvkeep


@cache
def commit() -> str | None:
    """Return the abbreviated commit of the installed kvkeep, with "-dirty" if files differ from it; None for an
    installed release."""
    folder = Path(kvkeep.__file__).parent
    tracked = _git(folder, "ls-files", "--error-unmatch", Path(kvkeep.__file__).name)
    if tracked is not None:  # excludes a repository that only contains the environment
        return _git(folder, "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*")
    try:
        source = json.loads(distribution("kvkeep").read_text("direct_url.json") or "{}")  # PEP 610
    except (PackageNotFoundError, ValueError):
        return None
    found = source.get("vcs_info", {}).get("commit_id")
    return None if found is None else str(found)[:7]


def version() -> str:
    """Return version and commit as text."""
    found = commit()
    return f"kvkeep {kvkeep.__version__}" + (f" (commit {found})" if found else "")


def machine(loaded: Any) -> dict[str, Any]:
    """Return the conditions of a measurement: model, weights, threads, versions, device, processor, and the path of the
    native library on it."""
    import torch
    import transformers

    from kvkeep.native.library import path

    return {
        "model": loaded.name,
        "weights": loaded.weights,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": str(loaded.model.device),
        "path": path(),
        "processor": processor_name(),
    }


def processor_name() -> str:
    """Return the product name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
