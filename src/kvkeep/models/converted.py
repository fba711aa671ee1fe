"""Converted copies: a GGUF file dequantised once and kept as safetensors, which load in a second."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from kvkeep.errors import ModelError
from kvkeep.extras import optional
from kvkeep.models.checksum import remembered_sha256, sha256
from kvkeep.models.folders import cache_folder
from kvkeep.models.quiet import quiet
from kvkeep.models.scratch import scratch, unwritable
from kvkeep.models.weights import read_weights

log = logging.getLogger(__name__)
_MANIFEST = "kvkeep.json"


def converted(gguf: Path, progress: Callable[[str], None]) -> Path:
    """Return the folder with the converted copy of ``gguf``, making it the first time.

    The copy is named by the file's checksum and moved into place whole. Sizes and checksums of its files are compared
    every time (0.35 s for the 540 MB of the default model), and a copy that differs is converted again. Raises
    ModelError for a file that cannot be read, or a cache folder that cannot be written.
    """
    folder = copy_folder(gguf.name, remembered_sha256(gguf))
    if _intact(folder):
        return folder
    if folder.exists():
        log.warning("The converted copy in %s is damaged; converting again.", folder)
    with scratch(folder.parent) as temporary:
        progress(f"Converting {gguf.name}, once ...")
        fresh = temporary / "model"
        model, tokenizer = _read(gguf)
        _write(model, tokenizer, fresh)
        if not _intact(folder):
            if folder.exists():
                os.rename(folder, temporary / "damaged")
            try:
                os.rename(fresh, folder)
            except OSError:
                if not _intact(folder):  # else another process was first
                    raise
    return folder


def copy_folder(name: str, checksum: str) -> Path:
    """Return the folder of the converted copy of a GGUF file, which may not exist."""
    return cache_folder() / "models" / f"{Path(name).stem}-{checksum[:16]}"


def _read(gguf: Path) -> tuple[Any, Any]:
    """Return the file's model, as plain float32, and its tokenizer."""
    import torch
    from transformers import AutoTokenizer

    try:
        _check_header(gguf)
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = read_weights(gguf.parent, str(gguf), gguf_file=gguf.name, dtype=torch.float32)
    except ModelError:
        raise
    except Exception as error:  # gguf and transformers raise anything on a damaged file
        raise _unreadable(gguf, error) from error
    # The weights are plain float32 now; transformers still takes the model for a quantised one.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = gguf.stem
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def _check_header(gguf: Path) -> None:
    """Raise ModelError unless the tensors have the layers and width of the header: transformers allocates by the header
    before it reads the tensors."""
    reader = optional("gguf", "gguf").GGUFReader(gguf)
    layers = Counter(tensor.name.split(".", 2)[2] for tensor in reader.tensors if tensor.name.startswith("blk."))
    sizes = {int(size) for tensor in reader.tensors for size in tensor.shape}
    stated = {name.rpartition(".")[2]: field.contents() for name, field in reader.fields.items()}
    if stated.get("block_count") != max(layers.values(), default=0) or stated.get("embedding_length") not in sizes:
        raise _unreadable(gguf, ValueError("its header and its tensors differ in the number of layers or their width"))


def _unreadable(gguf: Path, error: Exception) -> ModelError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(
        f"'{gguf}' cannot be read as a model: it is damaged, cut short, or of a kind transformers does not read "
        f"({first[:160]})."
    )


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save both into ``folder``, with a manifest of the files."""
    try:
        with quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # which is not an OSError even when the disk is full
        raise unwritable(folder.parents[1], str(error)) from error
    files = {path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"files": files}, indent=1))


def _intact(folder: Path) -> bool:
    """Compare every file with the manifest, sizes first."""
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
        sizes = all((folder / name).stat().st_size == facts["size"] for name, facts in files.items())
        return bool(files) and sizes and all(sha256(folder / name) == facts["sha256"] for name, facts in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no copy, or no valid manifest
        return False
