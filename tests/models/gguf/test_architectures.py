"""Every architecture keeps the blocks of a file, however its tensors lie there."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from gguf import GGUFReader
from gguf_files import requantised
from oracle_files import RECORDS
from torch import nn

from kvkeep.errors import ModelError, UnsupportedModelError
from kvkeep.models.experts import DOWN, PackedExperts
from kvkeep.models.gguf.explain import explain
from kvkeep.models.gguf.model import read_model
from kvkeep.models.loading import load
from kvkeep.models.packed import PackedEmbedding, PackedLinear

ONES = numpy.ones((32, 32), numpy.float32)
pytestmark = pytest.mark.usefixtures("kernels")

IDS: list[int] = json.loads((RECORDS / "models.json").read_text("utf-8"))["ids"]


def dense(name: str, module: nn.Module) -> dict[str, torch.Tensor]:
    """The packed weights of a module by name, in float32."""
    if isinstance(module, PackedEmbedding):
        return {f"{name}.weight": module.matrix.dense()}
    if isinstance(module, PackedLinear):
        return {f"{name}.weight": module.dense()}
    if isinstance(module, PackedExperts):
        gates = [one.dense().unflatten(0, (module.num_experts, -1)) for one in module._gates()]
        down = module.down.dense().unflatten(0, (module.num_experts, -1))
        first, form = torch.cat(gates, 1), module.form
        if form.transposed:
            first, down = torch.stack(first.chunk(2, 1), 2).flatten(1, 2).transpose(1, 2), down.transpose(1, 2)
        return {f"{name}.{form.first}": first, f"{name}.{DOWN}": down}
    return {}


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".gguf.xz") for path in RECORDS.glob("*.gguf.xz")))
def test_packed_weights_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    """Also of weights whose rows or columns are reordered, joined or split."""
    plain = tmp_path / "plain.gguf"
    plain.write_bytes(lzma.decompress((RECORDS / f"{name}.gguf.xz").read_bytes()))
    try:
        file = requantised(plain, tmp_path / "blocks.gguf")
        stored = read_model(file).tensors
    except UnsupportedModelError:
        pytest.skip("kvkeep does not read this file")
    packed = [to for to, tensor in stored.items() if tensor.packs]
    if not packed:
        pytest.skip("its rows are shorter than a block")
    model: Any = load(file, device="cpu").model
    theirs = load(file, weights="float32", device="cpu").model
    found: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        found |= dense(module_name, module)
    expected = theirs.state_dict()
    assert {*packed} <= {*found}
    for to in packed:
        assert torch.equal(found[to], expected[to]), to
    with torch.no_grad():
        ours, wanted = (one(torch.tensor([IDS]), use_cache=False).logits.float() for one in (model, theirs))
    assert torch.cosine_similarity(ours, wanted, dim=-1).mean() > 0.99  # rounding may choose other experts


@pytest.mark.parametrize(
    ("name", "keys", "tensors"),
    [
        (
            "glm4moe", {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1},
            ("blk.2.attn_q.weight", "blk.2.nextn.eh_proj.weight"),
        ),
        ("gemma4", {}, ("blk.2.attn_k.weight", "blk.3.attn_v.weight")),
        (
            "gemma3n", {},
            tuple(f"blk.{layer}.attn_{one}.weight" for layer in (20, 21) for one in ("k", "v", "k_norm")),
        ),
    ],
)  # fmt: skip
def test_tensors_that_llama_cpp_does_not_use_change_nothing(
    name: str, keys: dict[str, int], tensors: tuple[str, ...], tmp_path: Path
) -> None:
    """Layers that draft, and keys of layers that use another's."""
    plain = tmp_path / "plain.gguf"
    plain.write_bytes(lzma.decompress((RECORDS / f"{name}.gguf.xz").read_bytes()))
    more = requantised(plain, tmp_path / "more.gguf", "F32", keys, dict.fromkeys(tensors, ONES))
    with torch.no_grad():
        found, wanted = (
            load(file, weights="float32", device="cpu").model(torch.tensor([IDS]), use_cache=False).logits
            for file in (more, plain)
        )
    assert torch.equal(found, wanted)
    unused = [one for one in explain(more)["tensors"] if one["became"].startswith("nothing: ")]
    assert {one["name"] for one in unused} == {*tensors}


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("gemma4", {"without": ["rope_freqs.weight"]}, "is damaged: it lacks rope_freqs.weight"),
        ("gemma4", {"keys": {"gemma4.attention.shared_kv_layers": 4}}, "4 of its 4 layers use the keys of earlier"),
        ("gemma4", {"keys": {"gemma4.final_logit_softcapping": float("nan")}}, "softcapping is nan, and must be"),
        ("gemma3n", {"tensors": {"altup_proj.weight": numpy.ones((2, 16, 16), numpy.float32)}}, "states another shape"),
    ],
)  # fmt: skip
def test_a_file_of_another_gemma_is_refused_in_a_sentence(
    name: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.gguf"
    plain.write_bytes(lzma.decompress((RECORDS / f"{name}.gguf.xz").read_bytes()))
    with pytest.raises(ModelError, match=message):
        load(requantised(plain, tmp_path / "other.gguf", "F32", **changed), device="cpu")


def test_as_many_layers_that_draft_as_there_are_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain.gguf"
    plain.write_bytes(lzma.decompress((RECORDS / "qwen3_5.gguf.xz").read_bytes()))
    file = requantised(plain, tmp_path / "all.gguf", "F32", {"qwen35.nextn_predict_layers": 2})
    with pytest.raises(ModelError, match="it states 2 of its 2 layers for multi-token"):
        load(file, device="cpu")


def kv_b(file: Path) -> dict[str, Any]:
    """Keys and values of latents in one tensor, as files had them before llama.cpp multiplied with the latents."""
    stored = {tensor.name: torch.from_numpy(numpy.array(tensor.data)) for tensor in GGUFReader(file).tensors}
    made = {}
    for layer in range(2):
        keys, values = (stored[f"blk.{layer}.attn_{one}_b.weight"] for one in "kv")
        joined = torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
        made[f"blk.{layer}.attn_kv_b.weight"] = joined.contiguous().numpy()
    return made


DEEPSEEK = [f"blk.{layer}.attn_{one}_b.weight" for layer in range(2) for one in "kv"]
REAL: dict[str, tuple[str, dict[str, int], tuple[str, ...]]] = {
    "mixtures without dense layers": ("qwen3_5moe", {}, ("qwen35moe.feed_forward_length",)),
    "a rotated part, where nothing is rotated": ("nemotron_h", {"nemotron_h_moe.rope.dimension_count": 6}, ()),
    "a hybrid that states no experts": (
        "bamba", {"granitehybrid.expert_count": 0, "granitehybrid.expert_used_count": 0}, (),
    ),
    "a dense model of the hybrids' converter": (
        "granite",
        {"granite.expert_count": 0, "granite.expert_used_count": 0, "granite.ssm.conv_kernel": 4,
         "granite.ssm.inner_size": 64, "granite.ssm.state_size": 8, "granite.ssm.group_count": 1,
         "granite.ssm.time_step_rank": 4},
        (),
    ),
    "experts with a bias and no kind of gate": ("deepseek3", {}, ("deepseek2.expert_gating_func",)),
    "joined keys and values of latents": (
        "deepseek3",
        {"deepseek2.attention.key_length": 16, "deepseek2.attention.value_length": 16,
         "deepseek2.attention.head_count_kv": 4},
        ("deepseek2.attention.key_length_mla", "deepseek2.attention.value_length_mla", *DEEPSEEK),
    ),
    "a pattern without the layers that draft": (
        "exaone-moe", {"exaone-moe.block_count": 5, "exaone-moe.nextn_predict_layers": 1}, (),
    ),
    "layers that draft in another file": (
        "glm4moe", {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}, (),
    ),
}  # fmt: skip
"""What real files have and the records do not: a record, keys to add, and keys and tensors to leave out."""


@pytest.mark.parametrize("what", REAL)
def test_what_real_files_have_besides_changes_nothing(what: str, tmp_path: Path) -> None:
    name, keys, without = REAL[what]
    plain = tmp_path / "plain.gguf"
    plain.write_bytes(lzma.decompress((RECORDS / f"{name}.gguf.xz").read_bytes()))
    tensors = kv_b(plain) if "joined" in what else {"blk.4.nextn.eh_proj.weight": ONES} if "pattern" in what else {}
    other = requantised(plain, tmp_path / "other.gguf", "F32", keys, tensors, without)
    with torch.no_grad():
        found, wanted = (
            load(file, weights="float32", device="cpu").model(torch.tensor([IDS]), use_cache=False).logits
            for file in (other, plain)
        )
    assert torch.equal(found, wanted)


GEMMA_3N: list[tuple[str, Any, str]] = [
    ("altup.num_inputs", 5, "states gemma3n.altup.num_inputs = 5, and kvkeep runs four streams"),
    ("altup.active_idx", 1, "states gemma3n.altup.active_idx = 1, and kvkeep runs the layers on the first stream"),
    ("final_logit_softcapping", 20.0, "and kvkeep caps the logits of this architecture at 30"),
    ("attention.shared_kv_layers", 3, "and kvkeep gives 20 of 22 layers keys of their own"),
    ("attention.sliding_window_pattern", [False] * 22, "has no sliding layer 18 and full layer 19"),
    ("activation_sparsity_scale", [1.5] * 22, "states another gemma3n.activation_sparsity_scale than"),
    ("feed_forward_length", 1, "is damaged: its feed_forward_length is 1"),
    ("embedding_length_per_layer_input", 8, "its config states another shape for"),
]


@pytest.mark.parametrize(("key", "value", "sentence"), GEMMA_3N)
def test_what_llama_cpp_does_not_read_of_gemma_3n_must_say_what_it_computes(
    key: str, value: Any, sentence: str, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.gguf"
    plain.write_bytes(lzma.decompress((RECORDS / "gemma3n.gguf.xz").read_bytes()))
    file = requantised(plain, tmp_path / "other.gguf", "F32", {f"gemma3n.{key}": value})
    with pytest.raises(ModelError, match=sentence):
        load(file, weights="float32", device="cpu")
