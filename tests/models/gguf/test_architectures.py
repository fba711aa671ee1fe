"""Every architecture keeps the blocks of a file, however its tensors lie there."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import requantised
from oracle_files import RECORDS
from torch import nn

from kvkeep.errors import UnsupportedModelError
from kvkeep.models.experts import DOWN, GATES, PackedExperts
from kvkeep.models.gguf.model import read_model
from kvkeep.models.loading import load
from kvkeep.models.packed import PackedEmbedding, PackedLinear

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
        return {f"{name}.{GATES}": torch.cat(gates, 1), f"{name}.{DOWN}": down}
    return {}


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".gguf.xz") for path in RECORDS.glob("*.gguf.xz")))
def test_packed_weights_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    """Of rows and columns in another order, of tensors that are joined, and of those that are parted."""
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
