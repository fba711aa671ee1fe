"""The namespace of an engine: a digest of everything but the tokens that the bytes of its blocks depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import UsageError
from kvkeep.models.checksum import remembered_sha256

FORMAT = 2
"""Version of the files' format; it is part of the namespace."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_NAMES = ("_name_or_path", "_commit_hash", "transformers_version")
"""Settings of a model that only say where it comes from."""
_FIXED_ROPE = (None, "default", "linear", "llama3", "yarn")
"""Kinds of rotation that do not depend on the longest context that an engine allows."""


def namespace(facts: Mapping[str, Any]) -> str:
    """Return 32 hex digits for these facts, which are plain types."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def weights_of(model: str, revision: str | None = None, hub_folder: str | None = None) -> dict[str, str]:
    """Return the SHA-256 of each file of a model's weights by name. model: a folder, a file, or a hub id whose files
    are on this machine. A file is read once, and again when it changed. Raises UsageError if there are no files."""
    place = Path(model)
    if not place.exists():
        place = _snapshot(model, revision, hub_folder)
    files = [place] if place.is_file() else sorted(one for one in place.iterdir() if one.suffix in _WEIGHTS)
    if not files:
        raise UsageError(f"'{model}' has no files of weights ({', '.join(_WEIGHTS)}); give vLLM a folder that has.")
    return {file.name: remembered_sha256(file) for file in files}


def settings_of(config: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Return the settings in ``config`` that keys depend on. longest: tokens of the engine's context."""
    settings = {name: value for name, value in config.items() if name not in _NAMES}
    rope: Any = next((config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name)), {})
    kinds = {part.get("rope_type", part.get("type")) for part in (rope, *rope.values()) if isinstance(part, Mapping)}
    return settings if kinds <= {*_FIXED_ROPE} else settings | {"longest": longest}


def _snapshot(model: str, revision: str | None, hub_folder: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=hub_folder, local_files_only=True))
    except Exception as error:  # of many kinds, by the version of the hub's package
        raise UsageError(f"The weights of '{model}' are not on this machine; give vLLM a folder of them.") from error
