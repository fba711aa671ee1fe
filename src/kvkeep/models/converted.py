"""Converted copies: a GGUF file dequantised once and kept as safetensors, which load in a second."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvkeep.errors import ModelError
from kvkeep.models.embedded import sha256
from kvkeep.models.folders import cache_folder
from kvkeep.models.quiet import quiet

log = logging.getLogger(__name__)
_MANIFEST = "kvkeep.json"
_STALE = 24 * 3600  # seconds after which a temporary folder's owner is taken for dead


def converted(gguf: Path, tell: Callable[[str], None]) -> Path:
    """Return the folder with the converted copy of ``gguf``, making it the first time.

    The copy is found by the file's content, written beside and moved into place whole, and its files' sizes and
    checksums are recorded; a copy that does not match them is made anew. Raises ModelError for a file that cannot be
    read.
    """
    folder = cache_folder() / "models" / f"{gguf.stem}-{_identity(gguf)[:16]}"
    if _intact(folder):
        return folder
    if folder.exists():
        log.warning("The converted copy in %s is damaged; making it anew.", folder)
        shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    tell(f"Converting {gguf.name}, once ...")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".convert-", ignore_cleanup_errors=True) as temporary:
        fresh = Path(temporary) / "model"
        _convert(gguf, fresh)
        _record(fresh)
        try:
            os.rename(fresh, folder)
        except OSError:
            if not _intact(folder):  # else another process was first: its copy is as good
                raise
    return folder


def is_converted(name: str) -> Path | None:
    """Return the folder of a converted copy of a file called ``name``, if there is one."""
    found = sorted((cache_folder() / "models").glob(f"{Path(name).stem}-*"))
    return found[0] if found else None


def _identity(gguf: Path) -> str:
    """Return the file's SHA-256, remembered by path, size and time of change."""
    memory = cache_folder() / "gguf" / "checksums.json"
    stat = gguf.stat()
    key = f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):
        known = json.loads(memory.read_text())
    if key not in known:
        known[key] = sha256(gguf)
        memory.parent.mkdir(parents=True, exist_ok=True)
        _write_text(memory, json.dumps(known, indent=1))
    return known[key]


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            # The weights are plain float32 now; transformers still takes the model for a quantised one.
            model.hf_quantizer = None
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.config._name_or_path = gguf.stem
            model.generation_config.pad_token_id = tokenizer.pad_token_id
            model.generation_config.eos_token_id = tokenizer.eos_token_id
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except OSError as error:
        if error.errno is not None:  # the disk, not the file
            raise ModelError(f"'{gguf.name}' cannot be converted: {(error.strerror or str(error)).lower()}.") from error
        raise _unreadable(gguf, error) from error
    except Exception as error:
        raise _unreadable(gguf, error) from error


def _unreadable(gguf: Path, error: Exception) -> ModelError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(
        f"'{gguf}' cannot be read as a model: it is damaged, cut short, or of a kind transformers does not read "
        f"({first[:160]})."
    )


def _record(folder: Path) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256(path), "mtime_ns": path.stat().st_mtime_ns}
        for path in sorted(folder.iterdir())
    }
    (folder / _MANIFEST).write_text(json.dumps({"files": files}, indent=1))


def _intact(folder: Path) -> bool:
    """Compare every file with the manifest: its size always, its checksum when it was touched since."""
    try:
        manifest = folder / _MANIFEST
        recorded = json.loads(manifest.read_text())
        touched = False
        for name, facts in recorded["files"].items():
            stat = (folder / name).stat()
            if stat.st_size != facts["size"]:
                return False
            if stat.st_mtime_ns != facts["mtime_ns"]:
                if sha256(folder / name) != facts["sha256"]:
                    return False
                facts["mtime_ns"], touched = stat.st_mtime_ns, True
        if touched:
            with suppress(OSError):
                _write_text(manifest, json.dumps(recorded, indent=1))
        return True
    except (OSError, ValueError, KeyError):
        return False


def _sweep(folder: Path) -> None:
    """Remove what killed conversions left behind."""
    for left in folder.glob(".convert-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE:
                shutil.rmtree(left, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)
