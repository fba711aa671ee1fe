"""Packed weights: codes are those of the file or of the stored weights, and sizes are known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import saved
from families import FAMILIES, tiny
from gguf_files import written
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvkeep import KeepCache
from kvkeep.errors import ModelError, UsageError
from kvkeep.models.fingerprint import fingerprint
from kvkeep.models.loading import describe, load
from kvkeep.models.matrices import matrices
from kvkeep.models.packed import KINDS, Packed, PackedEmbedding, PackedLinear, quantised
from kvkeep.models.weight_memory import chosen_format
from kvkeep.native import library

BITS = {"bfloat16": 16, "int8": 8, "int4": 4}


def dense(model: Any) -> dict[str, Tensor]:
    """All weights by name in float32, packed ones written out."""
    found = {name: weight.detach().float() for name, weight in model.named_parameters()}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedEmbedding):
            found[f"{name}.weight"] = module.matrix.dense()
        elif isinstance(module, PackedLinear) and not name.endswith(".matrix"):
            found[f"{name}.weight"] = module.dense()
            if module.bias is not None:
                found[f"{name}.bias"] = module.bias.float()
    return found


def packed_bytes(model: Any) -> int:
    """Bytes of parameters, and of codes and scales without the padding of panels."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, Packed):
            about, bias = KINDS[module.kind], getattr(module, "bias", None)
            total += module.out_features * module.in_features // about.elements * about.packed
            total += 0 if bias is None else bias.nbytes
    return total


def least(name: str, bits: int) -> int:
    """Return the bits of a matrix where ``bits`` were asked for: embedding and head have 8 at least."""
    return max(8, bits) if name.startswith(("model.embed_tokens", "lm_head")) else bits


def test_packed_weights_equal_those_of_the_folder(model_folder: Path) -> None:
    stored = load_file(model_folder / "model.safetensors")
    for requested, bits in BITS.items():
        model = load(model_folder, weights=requested, device="cpu").model
        names = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, PackedLinear)}
        expected = {
            name: quantised(weight, least(name, bits)).dense() if name in names else weight.bfloat16().float()
            for name, weight in stored.items()
        }
        expected["model.embed_tokens.weight"] = quantised(stored["model.embed_tokens.weight"], max(8, bits)).dense()
        found = dense(model)
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), (requested, name)


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])  # see test_experts.py
@pytest.mark.parametrize("requested", ["bfloat16", "int8"])
def test_packed_weights_of_every_family_give_the_same_logits(family: str, requested: str, tmp_path: Path) -> None:
    """As the plain model with the weights that were packed."""
    loaded = load(saved(tiny(family), tmp_path), weights=requested, device="cpu")
    model, plain = loaded.model, copy.deepcopy(tiny(family))
    assert model.dtype == torch.bfloat16 and model.device.type == "cpu" and not model.training
    written, expected = dense(model), dict(plain.named_parameters())
    assert set(written) - {"lm_head.weight", "model.kvkeep_dtype"} == set(expected) - {"lm_head.weight"}
    with torch.no_grad():
        for name, weight in expected.items():
            weight.copy_(written[name])
    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = model(ids).logits.float(), plain(ids).logits
    cosines = torch.cosine_similarity(ours, theirs, dim=-1)
    # Rounding may make a router choose another expert for single tokens; a recurrent state hands that to later ones.
    assert cosines.median() > (0.997 if family == "qwen3_next" else 0.998)
    assert hasattr(plain.config, "num_experts_per_tok") or cosines.min() > 0.99
    packed = [module for module in model.modules() if isinstance(module, Packed)]
    assert packed if matrices(plain) else not packed
    assert not any(parameter.is_meta for parameter in [*model.parameters(), *model.buffers()])
    assert describe(tmp_path, weights=requested).weight_bytes == packed_bytes(model)
    assert not hasattr(model, "hf_quantizer") and not hasattr(model.config, "quantization_config")
    assert KeepCache(model).geometry.dtype_bytes == 2


@pytest.mark.parametrize("head", ["tied", "stored twice", "untied"])
def test_an_equal_head_and_embedding_share_a_matrix(head: str, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    config = copy.deepcopy(tiny("llama").config)
    config.tie_word_embeddings = head != "untied"
    made = LlamaForCausalLM(config)
    file = saved(made, tmp_path) / "model.safetensors"
    if head == "stored twice":
        weights = load_file(file)
        twice = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
        save_file(weights | twice, file, metadata={"format": "pt"})
    for requested in ("int8", "int4"):
        model = load(tmp_path, weights=requested, device="cpu").model
        assert (model.model.embed_tokens.matrix is model.lm_head) == (head != "untied")
        assert torch.equal(model.lm_head.dense(), quantised(made.lm_head.weight.detach(), 8).dense())


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", [*KINDS, "NVFP4"])
def test_weights_of_a_gguf_file_keep_their_bits(kind: str, tmp_path: Path) -> None:
    """Against transformers' own reading of the file; weights that are not packed are rounded to bfloat16."""
    from transformers import AutoModelForCausalLM

    file = tmp_path / "own.gguf"
    written(file, kind, hidden=256, inner=512)
    loaded = load(file, device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="own.gguf", dtype=torch.float32)
    found, expected = dense(loaded.model), {name: weight.float() for name, weight in theirs.state_dict().items()}
    assert found.keys() == expected.keys()
    about = KINDS.get(kind)
    assert loaded.weights == ("auto" if about and kind != "BF16" else "bfloat16")
    for name, weight in expected.items():
        exact = about is not None and weight.ndim == 2
        assert torch.equal(found[name], weight if exact else weight.bfloat16().float()), name
    assert loaded.model.model.embed_tokens.matrix is loaded.model.lm_head
    again = describe(file)
    assert again.weight_bytes == packed_bytes(loaded.model) and again.dtype == torch.bfloat16


@pytest.mark.parametrize("requested", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_a_gguf_file_can_be_loaded_in_another_format(requested: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    file = tmp_path / "own.gguf"
    written(file, "Q8_0")
    loaded = load(file, weights=requested, device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="own.gguf", dtype=torch.float32)
    found = dense(loaded.model)
    assert describe(file, weights=requested).weight_bytes == packed_bytes(loaded.model)
    for name, weight in theirs.named_parameters():
        kind = torch.float32 if requested == "float32" else torch.float16 if requested == "float16" else torch.bfloat16
        matrix = weight.ndim == 2 and requested.startswith("int")
        expected = weight.detach().to(kind).float()
        if matrix:
            expected = quantised(weight.detach(), least(name, BITS[requested])).dense()
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize(
    ("free", "requested", "sentence"),
    [
        (0, "auto", "weights auto, and 0 B of memory are free; it fits in none of float32, bfloat16"),
        (80_000, "float32", "with weights bfloat16 it would take 74.4 KB."),
        (50_000, "bfloat16", "with weights int8 it would take"),
        (40_000, "int8", "with weights int4 it would take"),
    ],
)
def test_a_model_too_large_is_refused_before_it_is_read(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, free: int, requested: str, sentence: str
) -> None:
    sizes = {kind: describe(model_folder, weights=kind).weight_bytes for kind in ("float32", *BITS)}
    assert sorted(sizes.values(), reverse=True) == list(sizes.values())
    assert sizes["int4"] < 40_000 < sizes["int8"] < 50_000
    monkeypatch.setattr("kvkeep.models.weight_memory.free_memory", lambda device: free)
    monkeypatch.setattr("kvkeep.models.loading.read_weights", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(ModelError) as refusal:
        load(model_folder, weights=requested, device="cpu")
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("requested", ["int8", "int4"])
def test_integer_weights_are_refused_on_an_accelerator(requested: str) -> None:
    with pytest.raises(UsageError, match=f"Weights in {requested} run on the cpu only, not on cuda:1; use bfloat16"):
        chosen_format(requested, torch.device("cuda:1"), gguf=True, stated=torch.bfloat16)


def test_auto_weights_follow_the_file_and_the_device(kernels: None) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert chosen_format("auto", cpu, True, torch.float32) == chosen_format("auto", cpu, True, torch.bfloat16)
    assert chosen_format("auto", cpu, True, torch.float32).packed
    for stated in (torch.float32, torch.float16):
        assert chosen_format("auto", cpu, False, stated).dtype == torch.float32
        assert chosen_format("auto", cuda, False, stated).dtype == stated
    assert chosen_format("auto", cpu, False, torch.bfloat16).dtype == torch.bfloat16
    assert not chosen_format("auto", cuda, True, torch.float32).packed
    assert chosen_format("auto", cuda, True, torch.float32).dtype == torch.bfloat16


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KVKEEP_CPU", "torch")
    library.library.cache_clear()
    yield
    library.library.cache_clear()


def test_without_kernels_all_formats_work(without_kernels: None, model_folder: Path, tmp_path: Path) -> None:
    written(tmp_path / "own.gguf", "Q4_1")
    ids = torch.tensor([[1, 5, 9]])
    plain = load(model_folder, weights="bfloat16", device="cpu").model
    assert type(plain.lm_head) is nn.Linear
    reference = tiny("llama")(ids).logits
    for requested in ("bfloat16", "int8", "int4"):
        logits = load(model_folder, weights=requested, device="cpu").model(ids).logits.float()
        assert torch.cosine_similarity(logits, reference, dim=-1).min() > 0.95, requested
    assert isinstance(load(tmp_path / "own.gguf", device="cpu").model.lm_head, PackedLinear)


def test_other_weights_than_auto_are_refused_for_a_quantised_model(spoiled: Callable[..., Path]) -> None:
    settings = tiny("llama").config.to_dict()
    folder = spoiled(config=settings | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}})
    with pytest.raises(UsageError, match="are already quantised and are loaded as they are; ask for auto"):
        load(folder, weights="int8", device="cpu")


def test_packed_weights_are_not_saved(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Packed weights cannot be saved"):
        load(model_folder, weights="int8", device="cpu").model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())


def test_the_fingerprint_covers_packed_weights(model_folder: Path) -> None:
    models = [load(model_folder, weights=requested, device="cpu").model for requested in BITS]
    assert len({fingerprint(model) for model in models}) == len(BITS)
    model = models[1]
    before = fingerprint(model)
    assert before == fingerprint(load(model_folder, weights="int8", device="cpu").model)
    packed = model.model.layers[2].mlp.up_proj.data
    packed.view(-1)[7] += 1  # no element of the sample
    assert fingerprint(model) != before
    packed.view(-1)[7] -= 1
    assert fingerprint(model) == before


def test_a_cast_keeps_packed_weights(model_folder: Path) -> None:
    model, ids = load(model_folder, weights="int8", device="cpu").model, torch.tensor([[1, 5, 9]])
    before, expected = dense(model), model(ids).logits
    wide = copy.deepcopy(model).float()
    after = dense(wide)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert wide.dtype == torch.float32 and torch.cosine_similarity(wide(ids).logits, expected.float(), -1).min() > 0.997
