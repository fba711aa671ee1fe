"""Loading models: by an embedded name, a GGUF file, a folder, or a hub id."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvkeep.budget import size
from kvkeep.errors import ModelError, ModelTooLarge, UnsupportedModelError, UsageError, out_of_memory, ran_out_of_memory
from kvkeep.models.adapter import decoder_of, layers_of
from kvkeep.models.embedded import EMBEDDED
from kvkeep.models.fetching import fetch
from kvkeep.models.fused import fuse
from kvkeep.models.gguf.model import GgufModel, read_model
from kvkeep.models.model_files import check_config, check_folder, check_ids, check_index, check_tokenizer
from kvkeep.models.model_names import check_device, checked_format, place_of
from kvkeep.models.packed import Packed
from kvkeep.models.packing import Packing
from kvkeep.models.silence import silenced
from kvkeep.models.weight_memory import Format, GgufTensors, check_memory, chosen_format, free_memory, weight_bytes
from kvkeep.models.weights import filled, read_weights
from kvkeep.native.library import trim_memory
from kvkeep.native.room import has_room

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

DEFAULT = "smollm2"
TOKENIZER_BYTES = 20
"""Memory that reading a tokenizer takes for a byte of tokenizer.json (measured: 17.8)."""

_TEXT_PARTS = {"gemma3n": "gemma3n_text"}
"""Families of which only the text part is loaded, and its family: transformers needs more packages for other parts."""


@dataclass(frozen=True)
class Loaded:
    """A model and its tokenizer."""

    model: PreTrainedModel = field(repr=False)
    """The model, in eval mode."""
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    """Its tokenizer, with a chat template."""
    name: str
    """The requested name."""
    source: str
    """A GGUF file, a folder or a hub id."""
    weights: str = "auto"
    """The format of the weights: the requested one, or a dtype that auto chose; auto: the bits of a GGUF file."""


@dataclass(frozen=True)
class Source:
    """The location of a model."""

    name: str
    """The requested name."""
    place: str
    """A folder or a hub id; the path of a GGUF file."""
    gguf: GgufModel | None = None
    """The model in a GGUF file; None: it is at ``place``."""
    revision: str | None = None
    """The revision of a hub id."""

    @property
    def stored(self) -> GgufTensors:
        """The weights in a GGUF file; None: it is none."""
        return None if self.gguf is None else self.gguf.tensors


@dataclass(frozen=True)
class ModelDescription:
    """A model that is not loaded."""

    config: Any
    dtype: torch.dtype
    """The dtype of activations and entries."""
    weight_bytes: int


def load(
    name: str | os.PathLike[str] | None = None,
    *,
    weights: str = "auto",
    device: str | None = None,
    revision: str | None = None,
    pre: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Loaded:
    """Load a causal language model and its tokenizer.

    name: an embedded model (``kvkeep models``; the default), a ``.gguf`` file, a folder with ``config.json``, or a hub
    id (``owner/name``). weights: auto, float32, bfloat16, float16, int8 or int4; auto keeps the bits of a GGUF file
    (on a CPU), and the bfloat16 of others where products in it are fast. device: cpu, cuda, cuda:1, mps; by default
    cuda where there is one. revision: the revision of a hub id. pre: llama.cpp's name of the pre-tokenizer of a GGUF
    file, in place of the one that the file states. progress: called with a line of text when a model is fetched.
    Raises UsageError, ModelError or UnsupportedModelError, each with one sentence.
    """
    text = os.fspath(name) if name is not None else DEFAULT
    requested, target = checked_format(weights), _device(device)
    with _naming_memory(text):
        source = _source(text, revision, progress or (lambda line: None), pre)
        with _explaining(source):
            config = _read_config(source)
            tokenizer = _tokenizer(source)
            trim_memory()  # releases the tokenizer's parsed files
            model = _model(source, config, requested, target)
        model.kvkeep_tokenizer = tokenizer  # for methods that prompt the model
        packed = any(isinstance(one, Packed) and one.kind != "BF16" for one in model.modules())
        kept = requested if requested != "auto" or packed else str(model.dtype).removeprefix("torch.")
        try:
            return Loaded(model.to(target), tokenizer, text, source.place, kept)
        except torch.OutOfMemoryError as error:
            raise ModelTooLarge(
                f"The model '{text}' does not fit into the memory of {target}; load it with smaller weights or on the "
                "cpu."
            ) from error


@contextmanager
def _naming_memory(name: str) -> Iterator[None]:
    """Within the block, an error for lack of memory becomes ModelTooLarge, whatever it was taken for."""
    try:
        yield
    except (ModelTooLarge, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizer's library raises no Exception
        if not ran_out_of_memory(error):
            raise
        free = size(free_memory(torch.device("cpu")))
        raise ModelTooLarge(
            f"There is not enough memory to load the model '{name}': {free} are free; use a smaller model or smaller "
            "weights (--weights int4), or allow the process more memory."
        ) from error


def describe(
    name: str | os.PathLike[str],
    *,
    weights: str = "auto",
    device: str = "cpu",
    pre: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModelDescription:
    """Return a description of the model that :func:`load` would return, without reading weights. The name may also be
    the path of a config.json. device: it may be missing on this machine. Raises the errors of :func:`load`."""
    text, requested = os.fspath(name), checked_format(weights)
    path = Path(text).expanduser()
    with _naming_memory(text):
        if path.is_file() and path.suffix == ".json":
            source = Source(text, str(path))
        else:
            source = _source(text, None, progress or (lambda line: None), pre)
        with _explaining(source):
            config = _read_config(source)
            made = chosen_format(requested, torch.device(device), source.gguf is not None, _stated(config))
            return ModelDescription(config, made.dtype, weight_bytes(config, made, source.stored))


def _source(text: str, revision: str | None, progress: Callable[[str], None], pre: str | None = None) -> Source:
    """Return the model's location; of a GGUF file, all that it states."""
    path = fetch(EMBEDDED[text], progress) if text in EMBEDDED else place_of(text, revision)
    if path is not None and path.is_file():
        return Source(text, str(path.resolve()), read_model(path.resolve(), pre))
    if pre is not None:
        raise UsageError(f"A pre-tokenizer is for a GGUF file, and '{text}' is none; leave it out.")
    if path is None:
        progress(f"Asking the Hugging Face hub for {text} ...")
        return Source(text, text, revision=revision)
    return Source(text, str(path))


def _device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    try:
        target = torch.device(device)
        torch.empty(1, device=target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"The device '{device}' is not available here; use cpu, or leave it out.") from error
    return target


def _tokenizer(source: Source) -> Any:
    if source.gguf is not None:
        return source.gguf.tokenizer
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    if (folder := Path(source.place)).is_dir():
        check_folder(folder)
        check_index(folder, source.name)
    file = folder / "tokenizer.json"
    if file.is_file() and not has_room(TOKENIZER_BYTES * file.stat().st_size + (32 << 20)):
        raise out_of_memory("the tokenizer")  # the library itself would end the process
    made = AutoTokenizer.from_pretrained(source.place, revision=source.revision, trust_remote_code=False)
    check_tokenizer(made, source.name)
    return made


def _model(source: Source, config: Any, requested: str, device: torch.device) -> Any:
    """Return the model in the ``requested`` format, after a check that it fits into memory."""
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    options: dict[str, Any] = {"revision": source.revision, "trust_remote_code": False}
    if config.model_type in _TEXT_PARTS.values():
        options["config"] = config
    if getattr(config, "quantization_config", None) is not None:
        if requested != "auto":
            raise UsageError(
                f"The weights of '{source.name}' are already quantised and are loaded as they are; ask for auto."
            )
        return read_weights(AutoModelForCausalLM, source.place, source.name, dtype="auto", **options)
    stored = source.stored
    made = chosen_format(requested, device, stored is not None, _stated(config))
    check_memory(source.name, config, requested, made, device, stored)
    if source.gguf is not None:
        model = _of_file(source.name, source.gguf, made)
    else:
        form: dict[str, Any] = {"quantization_config": Packing(made.bits)} if made.packed else {}
        model = read_weights(AutoModelForCausalLM, source.place, source.name, dtype=made.dtype, **form, **options)
    check_ids(model.generation_config, source.name)
    if made.packed:
        first = next(decoder_of(model).parameters(), None)  # transformers and kvkeep read its dtype
        if first is None or first.dtype != made.dtype:  # OLMo has no norms; other first ones are routers in float32
            empty = torch.nn.Parameter(torch.empty(0, dtype=made.dtype), requires_grad=False)
            decoder_of(model).register_parameter("kvkeep_dtype", empty)
        fuse(model, layers_of(decoder_of(model)))
    return model


def _of_file(name: str, gguf: GgufModel, made: Format) -> Any:
    from transformers.generation import GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model = filled(name, MODEL_FOR_CAUSAL_LM_MAPPING[type(gguf.config)], gguf.config, gguf.tensors, made)
    tokenizer = gguf.tokenizer
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=[*gguf.vocabulary.ends], pad_token_id=tokenizer.pad_token_id,
        **gguf.sampling,
    )  # fmt: skip
    model.name_or_path = model.config.name_or_path = str(gguf.file)
    return model


def _stated(config: Any) -> torch.dtype:
    """Return the dtype that a config states, or transformers' default."""
    found = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    stated = getattr(torch, found, None) if isinstance(found, str) else found
    return stated if isinstance(stated, torch.dtype) else torch.float32


def _read_config(source: Source) -> Any:
    if source.gguf is not None:
        return source.gguf.config
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    stated, _ = PreTrainedConfig.get_config_dict(source.place, revision=source.revision)
    family, name = stated.get("model_type"), source.name
    if family is not None and family not in CONFIG_MAPPING_NAMES:
        raise UnsupportedModelError(
            f"'{name}' is a '{family[:60]}' model, a family that transformers {version('transformers')} does not have; "
            "kvkeep never runs code from a model's repository."
        )
    check_config(stated, name)
    if family in _TEXT_PARTS:
        text = {"dtype": stated.get("dtype", stated.get("torch_dtype"))} | (stated.get("text_config") or {})
        return AutoConfig.for_model(**text | {"model_type": _TEXT_PARTS[family]})
    # Otherwise transformers prompts on the terminal to run code of the model.
    config = AutoConfig.from_pretrained(source.place, revision=source.revision, trust_remote_code=False)
    family = str(config.model_type)
    causal = family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    # BERT has a causal class too, but is bidirectional.
    masked = family in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if config.is_encoder_decoder or masked or not causal:
        raise UnsupportedModelError(
            f"'{name}' is a '{family}' model; kvkeep runs only decoders, which generate text token by token."
        )
    return config


@contextmanager
def _explaining(source: Source) -> Iterator[None]:
    """Within the block, transformers is silent, and whatever it raises becomes a ModelError of one sentence."""
    try:
        with silenced():
            yield
    except (ModelError, UsageError):
        raise
    except Exception as error:  # transformers, safetensors and the hub raise anything
        raise _explained(source, error) from error


def _explained(source: Source, error: Exception) -> ModelError:
    name, place = source.name, Path(source.place)
    first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    if place.is_dir():
        names = {path.name for path in place.iterdir()}
        if not names & {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"}:
            return ModelError(f"The folder '{name}' has no tokenizer (tokenizer.json); save it beside the model.")
        return ModelError(f"The model in '{name}' cannot be loaded: it is damaged or incomplete ({first}).")
    if source.gguf is not None:
        return ModelError(f"The model in '{name}' cannot be loaded ({first}).")
    return ModelError(
        f"The model '{name}' is not a folder and cannot be loaded from the hub: the hub has no such model, or there is "
        f"no connection ({first})."
    )
