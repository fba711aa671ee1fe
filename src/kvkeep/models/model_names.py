"""Names that a user gives: of a model, a format of weights, a device. They are checked before torch is imported."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvkeep.errors import ModelError, UsageError, reason_of, unknown
from kvkeep.models.embedded import EMBEDDED

FORMATS = ("auto", "float32", "bfloat16", "float16", "int8", "int4")
DEVICES = ("cpu", "cuda", "mps")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.gguf)")


def checked_format(weights: str) -> str:
    """Return the requested format. Raises UsageError, with the nearest name, for an unknown one."""
    if weights not in FORMATS:
        raise unknown("weight format", str(weights), FORMATS)
    return weights


def check_device(device: str | None) -> None:
    """Raise UsageError for a device of an unknown kind."""
    if device is not None and str(device).split(":")[0] not in DEVICES:
        raise unknown("device", str(device), DEVICES)


def place_of(text: str, revision: str | None = None) -> Path | None:
    """Return the folder or the GGUF file named by ``text``; None for an embedded model or a hub id. Raises UsageError
    for an unknown name, ModelError for a path without a model."""
    if not text.strip():
        raise UsageError("The model's name is empty; give an embedded model, a GGUF file, a folder or a hub id.")
    path = Path(text).expanduser()
    on_hub = text not in EMBEDDED and not os.path.exists(path) and _HUB_ID.fullmatch(text) is not None
    if revision is not None and not on_hub:
        raise UsageError(f"A revision is for a model on the hub, and '{text}' is not a hub id; leave it out.")
    if text in EMBEDDED or on_hub:
        return None
    if os.path.isdir(path):  # a name that is too long is none, and no error as with Path
        if not (path / "config.json").is_file():
            raise ModelError(f"The folder '{text}' is not a model: it has no config.json.")
        return path
    if os.path.isfile(path):
        _check_magic(text, path)
        return path
    if "/" in text or path.suffix == ".gguf" or path.is_absolute() or text.startswith((".", "~")):
        raise ModelError(f"There is no model at '{text}'.")
    reason = str(unknown("model", text, EMBEDDED)).removesuffix(".")
    raise UsageError(f"{reason}; or give a GGUF file, a folder, or a hub id (owner/name).")


def _check_magic(text: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"The file '{text}' cannot be read: {reason_of(error)}.") from error
    if magic != b"GGUF":
        raise ModelError(f"The file '{text}' is not a GGUF file; give a GGUF file or a folder with config.json.")
