"""Loading models: by an embedded name, a GGUF file, a folder, or a hub id."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvkeep.errors import ModelError, UnsupportedModelError, UsageError, unknown
from kvkeep.models.converted import converted, is_converted
from kvkeep.models.embedded import EMBEDDED, fetch
from kvkeep.models.folders import cache_folder
from kvkeep.models.quiet import quiet

DEFAULT = "smollm2"
_BOTH_WAYS = ("bert", "roberta", "xlm-roberta", "electra")
_BOTH_WAYS = ("bert", "roberta", "xlm-roberta", "electra")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": "auto"}


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, its tokenizer, the name it was asked for, and the folder or hub id it came from."""

    model: Any
    tokenizer: Any
    name: str
    source: str


@dataclass(frozen=True)
class Available:
    """An embedded model and what of it is on this machine. bytes_on_disk: GGUF file and converted copy."""

    name: str
    description: str
    licence: str
    fetched: bool
    path: Path | None
    bytes_on_disk: int


def load(
    name: str | os.PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | None = None,
    revision: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Loaded:
    """Load a causal language model and its tokenizer.

    name: an embedded model (``kvkeep models``; the default), a ``.gguf`` file, a folder with ``config.json``, or a hub
    id (``owner/name``). dtype: float32, bfloat16, float16, or auto (as stored). device: cpu, cuda, cuda:1, mps; by
    default cuda where there is one. progress: gets a line of text where something takes longer (fetching, converting).
    Raises UsageError, ModelError or UnsupportedModelError, each with one sentence.
    """
    text = os.fspath(name) if name is not None else DEFAULT
    kind, target = _dtype(dtype), _device(device)
    tell = progress or (lambda line: None)
    source = str(converted(fetch(EMBEDDED[text], tell), tell)) if text in EMBEDDED else _source(text, tell)
    model, tokenizer = _read(source, text, kind, revision)
    return Loaded(model.to(target).eval(), tokenizer, text, source)


def available() -> list[Available]:
    """Return the embedded models, and what of each is on this machine."""
    found = []
    for model in EMBEDDED.values():
        gguf, folder = cache_folder() / "gguf" / model.file, is_converted(model.file)
        files = [gguf] if gguf.is_file() else []
        files += list(folder.iterdir()) if folder is not None else []
        held = sum(path.stat().st_size for path in files)
        found.append(Available(model.name, model.description, model.licence, gguf.is_file(), folder, held))
    return found


def _source(text: str, tell: Callable[[str], None]) -> str:
    """Tell a path from a hub id, and see to it that a path is one that can be loaded."""
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"The folder '{text}' holds no model: it has no config.json.")
        return str(path)
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelError(f"The file '{text}' is not a GGUF file; give a GGUF file or a folder with config.json.")
        return str(converted(path.resolve(), tell))
    if path.suffix == ".gguf" or path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise ModelError(f"There is no model at '{text}'.")
    if text.count("/") == 1:
        return text
    raise unknown("model", text, EMBEDDED)


def _dtype(dtype: str | torch.dtype) -> Any:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    return DTYPES[dtype]


def _device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
        torch.empty(1, device=target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"The device '{device}' is not available here; use cpu, or leave it out.") from error
    return target


def _read(source: str, name: str, dtype: Any, revision: str | None) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        with quiet():
            config = AutoConfig.from_pretrained(source, revision=revision)
            _refuse_others(config, name)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, revision=revision)
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    except UnsupportedModelError:
        raise
    except Exception as error:  # transformers, safetensors and the hub raise of every kind here
        raise _explained(source, name, error) from error
    return model, tokenizer


def _refuse_others(config: Any, name: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = str(config.model_type)
    # BERT and its kin have a class for causal language models too, but were trained to see both ways.
    one_way = family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and family not in _BOTH_WAYS
    if config.is_encoder_decoder or not one_way:
        raise UnsupportedModelError(
            f"'{name}' is a '{family}' model, which is not a decoder that writes text token by token; kvkeep runs "
            "those only."
        )


def _explained(source: str, name: str, error: Exception) -> ModelError:
    first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    if Path(source).is_dir():
        names = {path.name for path in Path(source).iterdir()}
        if not names & {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"}:
            return ModelError(f"The folder '{name}' has no tokenizer (tokenizer.json); save it beside the model.")
        return ModelError(f"The model in '{name}' cannot be loaded: it is damaged or incomplete ({first}).")
    return ModelError(
        f"The model '{name}' cannot be had from the hub: there is no such model, or no connection ({first})."
    )
