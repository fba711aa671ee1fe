"""Loading models: weights are the stored ones, and everything else is refused in one sentence."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import saved
from families import tiny
from safetensors.torch import load_file, save_file

from kvkeep.errors import KvkeepError, ModelError, UnsupportedModelError, UsageError
from kvkeep.models.embedded import EMBEDDED, gguf_path
from kvkeep.models.folders import cache_folder
from kvkeep.models.loading import load
from kvkeep.models.packed import Packed


def test_a_folder_is_loaded_unchanged(model_folder: Path) -> None:
    loaded = load(model_folder, device="cpu")
    stored = load_file(model_folder / "model.safetensors")
    for name, weight in loaded.model.state_dict().items():
        if name in stored:
            assert torch.equal(weight, stored[name]), name
    assert (loaded.name, loaded.source) == (str(model_folder), str(model_folder))
    assert loaded.tokenizer("the of").input_ids
    assert not loaded.model.training
    assert not cache_folder().exists() or not [*cache_folder().iterdir()]  # no copy is made of a folder


def test_of_gemma_3n_the_text_part_is_loaded(tmp_path: Path) -> None:
    """Its other parts need packages for images."""
    model, folder = tiny("gemma3n"), saved(tiny("gemma3n"), tmp_path)
    stored = load_file(folder / "model.safetensors")
    parts = {name.replace("model.", "model.language_model.", 1): weight for name, weight in stored.items()}
    others = {"model.embed_vision.embedding.weight": torch.zeros(4, 4)}
    save_file(parts | others, folder / "model.safetensors", {"format": "pt"})
    about = {name: {"model_type": f"gemma3n_{name}"} for name in ("vision", "audio")}
    config = {"model_type": "gemma3n", "text_config": json.loads((folder / "config.json").read_text())}
    config |= {"architectures": ["Gemma3nForConditionalGeneration"], "dtype": "float32"}
    config |= {f"{name}_config": one for name, one in about.items()}
    (folder / "config.json").write_text(json.dumps(config))
    found, ids = load(folder, device="cpu").model, torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_files_that_change_later_change_no_weight(weights: str, spoiled: Callable[..., Path]) -> None:
    folder = spoiled()
    _check_nothing_is_mapped(load(str(folder), weights=weights, device="cpu").model, [*folder.glob("*.safetensors")])


@pytest.mark.parametrize("native", [True, False])
def test_a_gguf_file_that_changes_later_changes_no_weight(
    native: bool, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("kvkeep.models.packed.library", lambda: None)
    file = Path(shutil.copy(tiny_gguf, tmp_path))
    model = load(file).model
    assert any(isinstance(one, Packed) and one.native == native for one in model.modules())
    _check_nothing_is_mapped(model, [file])


def _check_nothing_is_mapped(model: Any, files: list[Path]) -> None:
    """Check that no file is mapped: one that is cut short later would end the process."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for file in files:
        with open(file, "r+b") as changed:
            changed.write(b"\xaa" * file.stat().st_size)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    maps = Path("/proc/self/maps")
    assert not maps.exists() or not any(str(file) in maps.read_text() for file in files)


def test_loading_prints_nothing_and_restores_logging(
    model_folder: Path, tiny_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    logging.enable_progress_bar()
    before, stderr = logging.get_verbosity(), sys.stderr
    load(model_folder)
    load(tiny_gguf)
    with pytest.raises(ModelError):
        load("/nowhere")
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (before, True)
    assert sys.stderr is stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"weights": "float23"}, "Unknown weight format 'float23': did you mean float32"),
        ({"weights": torch.int8}, "Unknown weight format 'torch.int8'"),
        ({"weights": 5}, "Unknown weight format '5'"),
        ({"device": "gpu"}, "Unknown device 'gpu': did you mean cpu"),
        ({"device": "meta"}, "Unknown device 'meta'"),
        ({"device": "cuda:97"}, "The device 'cuda:97' is not available here"),
        ({"revision": "main"}, "is not a hub id; leave it out"),
    ],
)
def test_an_impossible_option_is_refused(model_folder: Path, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        load(model_folder, **options)  # type: ignore[arg-type]
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        ("", UsageError, "The model's name is empty"),
        ("smolm2", UsageError, "Unknown model 'smolm2': did you mean smollm2?"),
        *(
            (name, ModelError, f"There is no model at '{name}'")
            for name in ("/no/such/folder", "./no-such", "models/no-such.gguf", "no-such.gguf")
        ),
    ],
)
def test_an_unknown_model_is_refused(name: str, kind: type[KvkeepError], sentence: str) -> None:
    with pytest.raises(kind) as refusal:
        load(name)
    assert sentence in str(refusal.value)


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries for half a minute
    said: list[str] = []
    with pytest.raises(ModelError, match="'some/model' is not a folder and cannot be loaded from the hub"):
        load("some/model", revision="main", progress=said.append)
    assert said == ["Asking the Hugging Face hub for some/model ..."]


@pytest.mark.parametrize(
    ("without", "sentence"),
    [
        (["config.json"], "is not a model: it has no config.json"),
        (["tokenizer.json"], "has no tokenizer (tokenizer.json)"),
        (["tokenizer.json", "tokenizer_config.json"], "has no tokenizer (tokenizer.json)"),
        (["model.safetensors"], "damaged or incomplete"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused(spoiled: Callable[..., Path], without: list[str], sentence: str) -> None:
    with pytest.raises(ModelError) as refusal:
        load(spoiled(*without))
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "keep", "sentence"),
    [
        *(("model.safetensors", keep, "damaged or incomplete") for keep in (0, 7, 2000, -1)),
        ("config.json", 1, "damaged or incomplete .*not a valid JSON"),
    ],
)
def test_a_truncated_file_is_refused(spoiled: Callable[..., Path], name: str, keep: int, sentence: str) -> None:
    file = spoiled() / name
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=sentence):
        load(file.parent)


@pytest.mark.parametrize("weights_format", ["auto", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(("rows", "sentence"), [(0, "it lacks"), (-1, "its config states another shape for")])
def test_a_missing_or_misshapen_weight_is_refused(
    spoiled: Callable[..., Path], rows: int, sentence: str, weights_format: str
) -> None:
    """transformers would fill it with random numbers."""
    file, name = spoiled() / "model.safetensors", "model.layers.1.self_attn.k_proj.weight"
    weights = load_file(file)
    weight = weights.pop(name)[:rows].contiguous()
    save_file(weights | ({name: weight} if rows else {}), file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"{sentence} {name};"):
        load(file.parent, weights=weights_format, device="cpu")


@pytest.mark.parametrize("family", ["bert", "camembert", "t5", "bart", "vit", "whisper"])
def test_a_model_that_is_no_decoder_is_refused_by_name(spoiled: Callable[..., Path], family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"is a '{family}' model; kvkeep runs only decoders"):
        load(spoiled(config={"model_type": family}))


def test_code_in_a_model_folder_is_not_run(
    spoiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """transformers would ask on the terminal."""
    custom_code = {"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    folder = spoiled(config={"model_type": "frobnicator", **custom_code})
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
    with pytest.raises(UnsupportedModelError, match="is a 'frobnicator' model, a family that transformers"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_model_too_large_for_the_device_is_refused(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch.nn.Module.to", "transformers.PreTrainedModel.to"):
        monkeypatch.setattr(name, Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(ModelError, match="does not fit into the memory of cpu"):
        load(model_folder, device="cpu")


@pytest.mark.real
def test_the_default_model_answers(smollm2: object) -> None:
    model, tokenizer = smollm2.model, smollm2.tokenizer  # type: ignore[attr-defined]
    settings = model.generation_config
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    ends = tokenizer.convert_ids_to_tokens(settings.eos_token_id)
    assert ends == ["<|endoftext|>", "<|im_end|>", "<reponame>"] and settings.pad_token_id == tokenizer.pad_token_id
    assert not settings.do_sample
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
@pytest.mark.real
def test_the_default_models_weights_equal_the_file(smollm2: object) -> None:
    """As gguf dequantises it; rows of query and key have another order there and are left out."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf_path(EMBEDDED["smollm2"])).tensors}
    ours = smollm2.model.state_dict()  # type: ignore[attr-defined]
    for theirs, name in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.17.ffn_down.weight": "model.layers.17.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }.items():
        tensor = tensors[theirs]
        assert torch.equal(ours[name], torch.tensor(dequantize(tensor.data, tensor.tensor_type))), name
