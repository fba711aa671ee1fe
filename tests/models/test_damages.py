"""Damaged models load and answer, or are refused in a sentence: within ten seconds and 2 GB, and without a signal."""

from __future__ import annotations

import json
import lzma
import random
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
from gguf_files import written
from mutated import answered, damaged_folder, damaged_gguf, ended
from oracle_files import RECORDS

from kvkeep.errors import KvkeepError, ModelError
from kvkeep.models import model_files
from kvkeep.models.loading import load
from kvkeep.models.model_files import MAX_NAME, check_names

SEEDS = 12


def test_a_damaged_file_answers_or_is_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.gguf").read_bytes()
    for seed in range(SEEDS):
        kind, data = damaged_gguf(whole, random.Random(seed))
        (tmp_path / "m.gguf").write_bytes(data)
        said = ended(lambda: answered(tmp_path / "m.gguf"))
        assert said.startswith(("answer: ", "error: ")), (seed, kind, said)


def test_a_damaged_folder_answers_or_is_refused(model_folder: Path, tmp_path: Path) -> None:
    for seed in range(SEEDS):
        kind = damaged_folder(model_folder, tmp_path / str(seed), random.Random(seed))
        said = ended(partial(answered, tmp_path / str(seed)))
        assert said.startswith(("answer: ", "error: ")), (seed, kind, said)


def test_a_model_without_parameters_answers(tmp_path: Path) -> None:
    """OLMo has no norms, and all its matrices are packed."""
    (tmp_path / "olmo.gguf").write_bytes(lzma.decompress((RECORDS / "olmo.gguf.xz").read_bytes()))
    assert ended(lambda: answered(tmp_path / "olmo.gguf")).startswith("answer: ")


def test_weights_that_are_not_numbers_are_named(tmp_path: Path) -> None:
    broken = numpy.full(64, numpy.nan, numpy.float32)
    file = written(tmp_path / "m.gguf", tensors={"output_norm.weight": broken})
    with pytest.raises(KvkeepError, match=r"^The model computed logits that are not numbers, .* weights are damaged"):
        answered(file)


@pytest.mark.parametrize("stated", [2**70, "x", 1.5, [True], -7, {"a": 1}])
def test_a_special_token_without_an_id_is_refused(stated: Any, changed: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"damaged"):
        answered(changed("generation_config.json", bos_token_id=stated, eos_token_id=stated))


@pytest.mark.parametrize("stated", ["x", [], -1, float("nan"), True])
def test_a_longest_text_that_is_no_number_is_refused(stated: Any, changed: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="its model_max_length is .*, no number above 0"):
        answered(changed("tokenizer_config.json", model_max_length=stated))


@pytest.fixture
def changed(spoiled: Callable[..., Path]) -> Callable[..., Path]:
    """A maker of copies of the tiny model's folder in whose file some keys have other values."""

    def make(name: str, **values: Any) -> Path:
        path = spoiled() / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return path.parent

    return make


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("names", [["n" * 7_000_000], [f"{n:07}{'n' * 93}" for n in range(70_000)]])
def test_long_names_of_added_tokens_are_refused_at_once(
    names: list[str], escaped: bool, changed: Callable[..., Path]
) -> None:
    added = [{"id": 900 + n, "content": one, "special": True} for n, one in enumerate(names)]
    folder = changed("tokenizer.json", added_tokens=added)
    if escaped:
        path = folder / "tokenizer.json"
        path.write_text(path.read_text().replace('"added_tokens"', '"added_token\\u0073"'))
    begun = time.process_time()
    with pytest.raises(ModelError, match=r"has (an added token of 7,000,000|added tokens whose names have more than)"):
        load(folder, device="cpu")
    assert time.process_time() - begun < 5


def test_names_of_a_gguf_file_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "MAX_NAMES", 10)
    with pytest.raises(ModelError, match=r"^'[^']*m.gguf' has added tokens whose names have more than 10 characters"):
        load(written(tmp_path / "m.gguf"), device="cpu")
    with pytest.raises(ModelError, match=f"an added token of {MAX_NAME + 1} characters"):
        check_names(["a" * (MAX_NAME + 1)], "m")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("rope_parameters", {"rope_type": "dynamic", "factor": float("inf"), "rope_theta": 1.0}, "factor is inf"),
        ("rope_parameters", {"rope_type": "longrope", "short_factor": [1] * 10**6}, "a list of 1,000,000"),
        ("num_attention_heads", 2**63, "num_attention_heads is 9223372036854775808"),
        ("num_hidden_layers", 10**9, "not 1 to 10000"),
        ("sliding_window", -1, "a negative number of tokens"),
        ("rms_norm_eps", float("nan"), "not a finite number"),
    ],
)
def test_absurd_numbers_of_a_config_are_named(key: str, value: Any, why: str, changed: Callable[..., Path]) -> None:
    begun = time.process_time()
    with pytest.raises(ModelError, match=f"^The config of '[^']*' is damaged: its .*{re.escape(why)}[^\n]*\\.$"):
        load(changed("config.json", **{key: value}), device="cpu")
    assert time.process_time() - begun < 2


def test_a_text_that_a_tokenizer_cannot_read_is_one_sentence(changed: Callable[..., Path], model_folder: Path) -> None:
    model = json.loads((model_folder / "tokenizer.json").read_text())["model"]
    with pytest.raises(ModelError, match="^The model's tokenizer cannot read this text "):
        answered(changed("tokenizer.json", model=model | {"unk_token": "nothing"}))


@pytest.mark.parametrize("part", ["../model.safetensors", "/etc/passwd", "gone.safetensors", "", 5, ".."])
def test_an_index_names_files_beside_it(part: Any, spoiled: Callable[..., Path], model_folder: Path) -> None:
    """Else a model could have any file of the machine opened."""
    folder = spoiled()
    (folder.parent / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").unlink()
    names = load(model_folder, device="cpu").model.state_dict()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, part)}))
    with pytest.raises(ModelError, match=r"its model\.safetensors\.index\.json names .* no file beside it"):
        load(folder, device="cpu")


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "tokenizer.json", "generation_config.json"])
def test_a_file_that_does_not_fit_into_memory_is_one_sentence(name: str, spoiled: Callable[..., Path]) -> None:
    with (folder := spoiled()).joinpath(name).open("r+b") as file:
        file.truncate(10**12)  # a hole
    with pytest.raises(ModelError, match=r"^There is not enough memory to load the model"):
        load(folder, device="cpu")
