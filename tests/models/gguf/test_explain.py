"""What was read of a file is explained: every key, every tensor, the config and the tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf_files import TEMPLATE, written

from kvkeep.models.gguf.explain import explain
from kvkeep.models.gguf.header import read_header


def test_every_key_and_every_tensor_is_explained(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.ones(8, np.float32)}
    file = written(tmp_path / "a.gguf", "Q8_0", keys={"general.author": "me", "mine.note": 3}, tensors=factors)
    found, header = explain(file), read_header(file)
    uses = {one["key"]: one["use"] for one in found["keys"]}
    assert uses.keys() == header.metadata.keys() and all(uses.values())
    assert uses["llama.context_length"] == "read" and uses["mine.note"] == "a note of another program"
    became = {one["name"]: (one["became"], one["kind"], one["in_memory"]) for one in found["tensors"]}
    assert became.keys() == header.tensors.keys()
    assert became["rope_freqs.weight"] == ("config: rope_parameters", "F32", "")
    assert became["blk.0.attn_q.weight"] == ("model.layers.0.self_attn.q_proj.weight", "Q8_0", "Q8_0")
    assert became["output_norm.weight"] == ("model.norm.weight", "F32", "BF16")
    assert found["files"] == [str(file)] and found["architecture"] == found["family"] == "llama"
    assert found["config"]["hidden_size"] == 64 and found["tokenizer"]["ends"] == {"2": "</s>"}
    assert found["tokenizer"]["chat_templates"] == ["default"]
    assert header.metadata["tokenizer.chat_template"] == TEMPLATE
