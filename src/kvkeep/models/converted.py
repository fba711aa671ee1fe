"""Converted copies of a GGUF file's tokenizer, config and table of tensors, which take seconds to read from the file.

Weights remain in the file; every load reads them from there.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvkeep.errors import ModelError
from kvkeep.models.checksum import remembered_sha256, sha256
from kvkeep.models.folders import cache_folder
from kvkeep.models.gguf_table import GgufTable, table
from kvkeep.models.gguf_reader import open_gguf, parsed_once
from kvkeep.models.matrices import built
from kvkeep.models.scratch import scratch, unwritable
from kvkeep.models.silence import silenced
from kvkeep.models.weights import refuse_incomplete

log = logging.getLogger(__name__)
_MANIFEST = "kvkeep.json"
TABLE = "tensors.json"


def converted(gguf: Path, progress: Callable[[str], None]) -> Path:
    """Return the folder with the converted copy of ``gguf``; create it the first time.

    The copy is named by the file's checksum and moved into place when complete. Every call compares the sizes and
    checksums of its files, and converts a differing copy again. Raises ModelError for a file that cannot be read or
    lacks a weight, or a cache folder that cannot be written.
    """
    folder = copy_folder(gguf.name, remembered_sha256(gguf))
    if _intact(folder):
        return folder
    if folder.exists():
        log.warning("The converted copy in %s is damaged; converting again.", folder)
    with scratch(folder.parent) as temporary:
        fresh = temporary / "model"
        _write(*_read(gguf, progress), fresh)
        if not _intact(folder):
            if folder.exists():
                os.rename(folder, temporary / "damaged")
            try:
                os.rename(fresh, folder)
            except OSError:
                if not _intact(folder):  # another process may have created it
                    raise
    return folder


def copy_folder(name: str, checksum: str) -> Path:
    """Return the folder of a GGUF file's converted copy. The folder may not exist."""
    return cache_folder() / "converted" / f"{Path(name).stem}-{checksum[:16]}"


def tensors(folder: Path) -> GgufTable:
    """Return the table of tensors in the copy ``folder``."""
    return GgufTable.from_json(json.loads((folder / TABLE).read_text()))


def _read(gguf: Path, progress: Callable[[str], None]) -> tuple[Any, Any, GgufTable]:
    """Return the file's model without weights (on torch's meta device), its tokenizer, and its table of tensors. The
    size of the file is checked first, before ``progress`` announces the conversion."""
    import torch
    from transformers.generation import GenerationConfig
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    try:
        reader = open_gguf(gguf)
        _check_header(gguf, reader)
        progress(f"Converting {gguf.name}, once ...")
        with silenced(), parsed_once(gguf, reader):
            config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = built(config, torch.bfloat16)
            tensors_table = table(reader, model)
    except ModelError:
        raise
    except Exception as error:  # gguf and transformers raise anything on a damaged file
        raise _unreadable(gguf, error) from error
    _check_names(gguf, model, tensors_table)
    model.config._name_or_path = gguf.stem
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer, tensors_table


def _check_names(gguf: Path, model: Any, tensors_table: GgufTable) -> None:
    """Raise ModelError for a weight that the file lacks."""
    there = {entry.to for entry in tensors_table.entries}
    tied = model.all_tied_weights_keys
    lacking = [name for name in model.state_dict() if name not in there and tied.get(name) not in there]
    refuse_incomplete(str(gguf), lacking, [])


def _check_header(gguf: Path, reader: Any) -> None:
    """Raise ModelError unless the tensors have the layers and width of the header: transformers allocates by the header
    before it reads the tensors."""
    layers = Counter(tensor.name.split(".", 2)[2] for tensor in reader.tensors if tensor.name.startswith("blk."))
    sizes = {int(size) for tensor in reader.tensors for size in tensor.shape}
    ends = ("block_count", "embedding_length")
    fields = {name.rpartition(".")[2]: field for name, field in reader.fields.items()}
    count, width = (fields[end].contents() if end in fields else None for end in ends)
    if count != max(layers.values(), default=0) or width not in sizes:
        raise _unreadable(gguf, ValueError("its header and its tensors differ in the number of layers or their width"))


def _unreadable(gguf: Path, error: Exception) -> ModelError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(
        f"'{gguf}' cannot be read as a model: it is damaged, truncated, or of a kind that transformers cannot read "
        f"({first[:160]})."
    )


def _write(model: Any, tokenizer: Any, tensors_table: GgufTable, folder: Path) -> None:
    """Save config, tokenizer and table into ``folder``, with a manifest of the files."""
    with silenced():
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:  # the library raises other errors, even if the disk is full
            raise unwritable(folder.parents[1], str(error)) from error
    (folder / TABLE).write_text(json.dumps(tensors_table.to_json()))
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
