"""Make tiny models: random weights of few values, exact in float16, so that a file packs into a few kilobytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from architectures import OLDER, VOCABULARY, configuration
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
LETTERS = [chr(33 + number) for number in range(VOCABULARY - len(SPECIAL) - 3)] + ["Ġ", "Ċ"]
POSITIONS = 48
GAIN = 1.5
WIDEST = 300
"""Columns that are drawn. Those of wider matrices repeat, so that their file compresses well."""


def token_ids() -> list[int]:
    """The sequence that all models read: no special token, one token twice in a row, and a phrase that is repeated."""
    drawn = torch.randint(len(SPECIAL), VOCABULARY, (POSITIONS,), generator=torch.Generator().manual_seed(48))
    drawn[30:36] = drawn[4:10]
    drawn[21] = drawn[20]
    return drawn.tolist()


def model(variant: str, computed: bool = False) -> Any:
    """The model of a variant, float32; the same for every call. ``computed``: as llama.cpp computes it."""
    torch.manual_seed(0)
    made = (
        AutoModelForCausalLM.from_config(configuration(variant, computed), experts_implementation="eager")
        .float()
        .eval()
    )
    with torch.no_grad():
        for name, values in made.state_dict(keep_vars=True).items():
            if values.is_floating_point():
                values.copy_(_drawn(name, values))
    return made


def _drawn(name: str, values: torch.Tensor) -> torch.Tensor:
    """Values near those that a vector had; a matrix of which each output has about the size of an input."""
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randint(-1, 2, (*values.shape[:-1], min(values.shape[-1], WIDEST)), generator=random).float()
    signs = drawn.repeat(*[1] * (values.ndim - 1), -(-values.shape[-1] // WIDEST))[..., : values.shape[-1]]
    if values.ndim < 2:
        return (4 * values).round() / 4 + signs / 4
    if "emb" in name or "wte" in name or "wpe" in name:
        return signs / 2
    return signs * 2.0 ** round(float(torch.tensor(GAIN / values.shape[-1] ** 0.5).log2()))


def write_folder(variant: str, folder: Path) -> None:
    """Write a model as transformers does, with a byte-level tokenizer of single characters."""
    model(variant).save_pretrained(folder)
    older = OLDER.get(variant, {})
    (folder / "older.json").write_text(json.dumps(older))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | older))
    tokens = [*SPECIAL, *LETTERS, '!"']
    bpe = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, [("!", '"')], unk_token=SPECIAL[0]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    named = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=bpe, **named).save_pretrained(folder)


def logprobs(made: Any, dtype: torch.dtype) -> torch.Tensor:
    """Log-probabilities that transformers computes at all positions, (positions, vocabulary), float64."""
    with torch.no_grad():
        logits = made.to(dtype)(torch.tensor([token_ids()]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


@contextmanager
def gelu_of_ggml() -> Iterator[None]:
    """Models that are made and run within compute every GELU as ggml does: of float16, by tanh, to float16."""
    from transformers import activations
    from transformers.models.bloom import modeling_bloom

    exact = torch.nn.functional.gelu

    def table(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
        looked_up = exact(x.half().float(), approximate="tanh").half().to(x.dtype)
        return torch.where(x.abs() < 10, looked_up, x.relu())

    with (
        patch.object(torch.nn.functional, "gelu", table),
        patch.object(activations.NewGELUActivation, "forward", lambda self, x: table(x)),
        patch.object(modeling_bloom.BloomGelu, "forward", lambda self, x: table(x)),
    ):
        yield
