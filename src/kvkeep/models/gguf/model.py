"""A model in a GGUF file: all that the file states, checked, before its weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvkeep.errors import ModelError, UnsupportedModelError
from kvkeep.models.gguf.architectures import ARCHITECTURES
from kvkeep.models.gguf.configs import CONFIGS
from kvkeep.models.gguf.facts import OURS, Facts, FileKeys, check_read
from kvkeep.models.gguf.header import read_header
from kvkeep.models.gguf.tensors import GgufTensor, packing_places, tensors_of
from kvkeep.models.gguf.tokenizer import build_tokenizer
from kvkeep.models.gguf.vocabulary import Vocabulary, vocabulary_of
from kvkeep.models.matrices import built
from kvkeep.models.silence import without_warnings

SAMPLING: Mapping[str, tuple[str, type[Any]]] = {
    "temperature": ("temp", float), "top_k": ("top_k", int), "top_p": ("top_p", float), "min_p": ("min_p", float),
    "repetition_penalty": ("penalty_repeat", float),
}  # fmt: skip
"""Fields of GenerationConfig, and the name and type of the file's recommendation."""


@dataclass(frozen=True)
class GgufModel:
    """A model in a GGUF file."""

    file: Path
    facts: Facts = field(repr=False)
    config: Any = field(repr=False)
    """transformers' config."""
    pre: str | None = None
    """The name of the pre-tokenizer that a user gave in place of the file's."""

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens, and the ids that end an answer. Raises as :attr:`tokenizer`."""
        return vocabulary_of(self.facts.keys, self.pre)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises ModelError or UnsupportedModelError if the file has none that kvkeep reads."""
        keys = self.facts.keys
        tokenizer = build_tokenizer(keys, self.vocabulary)
        check_read(keys, self.facts.architecture)
        if (count := len(tokenizer)) != self.config.vocab_size:
            raise keys.damaged(f"its vocabulary has {count} tokens, and its embedding {self.config.vocab_size} rows")
        return tokenizer

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling that the file recommends, as fields of transformers' GenerationConfig; empty if it recommends
        none."""
        keys = self.facts.keys
        stated = {name: keys.get(f"general.sampling.{key}", kind) for name, (key, kind) in SAMPLING.items()}
        found = {name: one for name, one in stated.items() if one is not None}
        return found | {"do_sample": True} if found else {}

    @cached_property
    def tensors(self) -> Mapping[str, GgufTensor]:
        """The weights by the model's names. Raises UnsupportedModelError for a tensor that the model does not have."""
        model = built(self.config)
        found, shapes = tensors_of(self.facts, packing_places(model)), model.state_dict()
        for to, tensor in found.items():
            if to not in shapes:
                raise UnsupportedModelError(
                    f"'{self.file}' has the tensor {tensor.parts[0].name}, which a model of the architecture "
                    f"'{self.facts.architecture}' with this config does not have."
                )
        return found


def read_model(file: Path, pre: str | None = None) -> GgufModel:
    """Return the model in ``file``. pre: the name of a pre-tokenizer in place of the file's.

    Raises ModelError for a damaged file, UnsupportedModelError for one that states what kvkeep does not know.
    """
    header = read_header(file)
    keys = FileKeys(file, header.metadata)
    name = keys.need("general.architecture", str)
    kind = keys.get("general.type", str, "model")
    if kind != "model":
        raise UnsupportedModelError(f"'{file}' is no model but of the type {kind[:40]!r}; give the model's file.")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"'{file}' has the architecture {name[:40]!r}; kvkeep reads GGUF files of {', '.join(ARCHITECTURES)}. Load "
            "the model from a folder or the hub, if transformers has it."
        )
    facts = Facts(name, keys, header.tensors)
    made = CONFIGS[name](facts)
    stated = keys.get(f"{name}.vocab_size", int, made["vocab_size"])
    if stated != made["vocab_size"]:
        raise keys.damaged(f"it states {stated} tokens, and its embedding has {made['vocab_size']} rows")
    check_read(keys, name, tuple(one for one in OURS if one != "tokenizer"))
    return GgufModel(file, facts, _config(file, made), pre)


def _config(file: Path, made: dict[str, Any]) -> Any:
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        with without_warnings():  # a factor of YaRN need not be the ratio of the context lengths
            return CONFIG_MAPPING[made["model_type"]](
                **{name: value for name, value in made.items() if name != "model_type"}
                | {"dtype": torch.bfloat16, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
            )
    except Exception as error:  # checks of configs raise several kinds
        first = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise ModelError(f"'{file}' is damaged: its sizes are no '{made['model_type']}' model ({first}).") from error
