"""Loading models: by an embedded name, a GGUF file, a folder, or a hub id."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvkeep.errors import ModelError, UnsupportedModelError, UsageError, unknown
from kvkeep.models.converted import converted, copy_folder
from kvkeep.models.embedded import EMBEDDED, fetch, gguf_path
from kvkeep.models.quiet import quiet
from kvkeep.models.weights import read_weights

DEFAULT = "smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": "auto"}
MOST_LAYERS = 10_000
DEVICES = ("cpu", "cuda", "mps")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.gguf)")


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, its tokenizer, its requested name, and its source: a folder or hub id."""

    model: Any
    tokenizer: Any
    name: str
    source: str


@dataclass(frozen=True)
class Available:
    """An embedded model and its files on this machine. bytes_on_disk: GGUF file and converted copy."""

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
    default cuda where there is one. revision: of a hub id. progress: receives a line of text when fetching or
    converting. Raises UsageError, ModelError or UnsupportedModelError, each with one sentence.
    """
    text = os.fspath(name) if name is not None else DEFAULT
    kind, target = _dtype(dtype), _device(device)
    source = _source(text, revision, progress or (lambda line: None))
    model, tokenizer = _read(source, text, kind, revision)
    try:
        return Loaded(model.to(target), tokenizer, text, source)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"The model '{text}' does not fit into the memory of {target}; load it in a smaller dtype or on the cpu."
        ) from error


def load_config(
    name: str | os.PathLike[str], *, revision: str | None = None, progress: Callable[[str], None] | None = None
) -> Any:
    """Return the config of a model, named as in :func:`load` or by the path of a config.json, without reading weights.
    Raises as :func:`load`."""
    text = os.fspath(name)
    path = Path(text).expanduser()
    source = (
        str(path)
        if path.is_file() and path.suffix == ".json"
        else _source(text, revision, progress or (lambda line: None))
    )
    try:
        with quiet():
            return _read_config(source, text, revision)
    except ModelError:
        raise
    except Exception as error:  # as below
        raise _explained(source, text, error) from error


def available() -> list[Available]:
    """Return the embedded models and their files on this machine."""
    found = []
    for model in EMBEDDED.values():
        gguf, folder = gguf_path(model), copy_folder(model.file, model.sha256)
        copy = list(folder.iterdir()) if folder.is_dir() else []
        held = sum(path.stat().st_size for path in [gguf, *copy] if path.is_file())
        path = folder if copy else None
        found.append(Available(model.name, model.description, model.licence, gguf.is_file(), path, held))
    return found


def _source(text: str, revision: str | None, progress: Callable[[str], None]) -> str:
    """Return the folder of the model, converted first if needed, or the hub id."""
    path = Path(text).expanduser()
    on_hub = text not in EMBEDDED and not path.exists() and _HUB_ID.fullmatch(text) is not None
    if revision is not None and not on_hub:
        raise UsageError(f"A revision is for a model on the hub, and '{text}' is not a hub id; leave it out.")
    if text in EMBEDDED:
        return str(converted(fetch(EMBEDDED[text], progress), progress))
    if on_hub:
        progress(f"Asking the Hugging Face hub for {text} ...")
        return text
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"The folder '{text}' holds no model: it has no config.json.")
        return str(path)
    if path.is_file():
        try:
            with path.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise ModelError(f"The file '{text}' cannot be read: {(error.strerror or str(error)).lower()}.") from error
        if magic != b"GGUF":
            raise ModelError(f"The file '{text}' is not a GGUF file; give a GGUF file or a folder with config.json.")
        return str(converted(path.resolve(), progress))
    if "/" in text or path.suffix == ".gguf" or path.is_absolute() or text.startswith((".", "~")):
        raise ModelError(f"There is no model at '{text}'.")
    raise unknown("model", text, EMBEDDED)


def _dtype(dtype: str | torch.dtype) -> Any:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return DTYPES[name]


def _device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if str(device).split(":")[0] not in DEVICES:
        raise unknown("device", str(device), DEVICES)
    try:
        target = torch.device(device)
        torch.empty(1, device=target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"The device '{device}' is not available here; use cpu, or leave it out.") from error
    return target


def _read(source: str, name: str, dtype: Any, revision: str | None) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    try:
        with quiet():
            _read_config(source, name, revision)
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
            model = read_weights(source, name, dtype=dtype, revision=revision, trust_remote_code=False)
    except ModelError:
        raise
    except Exception as error:  # transformers, safetensors and the hub raise anything
        raise _explained(source, name, error) from error
    return model, tokenizer


def _read_config(source: str, name: str, revision: str | None) -> Any:
    from transformers import AutoConfig, PreTrainedConfig

    stated, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
    _refuse_unknown(stated.get("model_type"), name)
    _refuse_sizes(stated, name)
    # Otherwise transformers prompts on the terminal to run code of the model.
    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    _refuse_others(config, name)
    return config


def _refuse_unknown(family: str | None, name: str) -> None:
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if family is not None and family not in CONFIG_MAPPING_NAMES:
        raise UnsupportedModelError(
            f"'{name}' is a '{family}' model, a family that transformers {__version__} does not have; kvkeep runs no "
            "code that comes with a model."
        )


def _refuse_sizes(stated: dict[str, Any], name: str) -> None:
    """Raise ModelError for an absurd number of layers, which transformers would allocate."""
    for part in (stated, *(part for part in stated.values() if isinstance(part, dict))):
        for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if (count := part.get(key, 1)) is not None and not (type(count) is int and 0 < count <= MOST_LAYERS):
                raise ModelError(
                    f"The config of '{name}' is damaged: its {key} is {str(count)[:40]}, not 1 to {MOST_LAYERS}."
                )


def _refuse_others(config: Any, name: str) -> None:
    from transformers.models.auto import modeling_auto as families

    family = str(config.model_type)
    causal = family in families.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    # BERT has a causal class too, but is bidirectional.
    masked = family in families.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if config.is_encoder_decoder or masked or not causal:
        raise UnsupportedModelError(
            f"'{name}' is a '{family}' model, which is not a decoder that generates text token by token; kvkeep runs "
            "only those."
        )


def _explained(source: str, name: str, error: Exception) -> ModelError:
    first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    if Path(source).is_dir():
        names = {path.name for path in Path(source).iterdir()}
        if not names & {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"}:
            return ModelError(f"The folder '{name}' has no tokenizer (tokenizer.json); save it beside the model.")
        return ModelError(f"The model in '{name}' cannot be loaded: it is damaged or incomplete ({first}).")
    return ModelError(
        f"The model '{name}' is no folder and cannot be loaded from the hub: there is no such model, or no "
        f"connection ({first})."
    )
