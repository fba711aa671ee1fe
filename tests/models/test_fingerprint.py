"""A model's fingerprint depends on every byte of its weights, and is computed once while these stay as they are."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from families import tiny
from gguf_files import written

from kvkeep.models import fingerprint as module
from kvkeep.models.fingerprint import fingerprint, fingerprint_of_tokenizer, sampled_fingerprint
from kvkeep.models.gguf.model import read_model


def test_every_element_counts_and_settings_do() -> None:
    model = copy.deepcopy(tiny("llama"))
    before = fingerprint(model)
    assert len(before) == 32 and before == fingerprint(tiny("llama"))
    weight = model.model.layers[1].mlp.up_proj.weight
    whole = weight.detach().clone()
    sampled = sampled_fingerprint(model)
    for place in (1, weight.numel() // 2 + 3, weight.numel() - 1):
        with torch.no_grad():
            weight.view(-1)[place] += 1
        assert sampled_fingerprint(model) == sampled and fingerprint(model) != before
        with torch.no_grad():
            weight.copy_(whole)
        assert fingerprint(model) == before
    model.config.rope_parameters = model.config.rope_parameters | {"rope_theta": 12345.0}
    assert fingerprint(model) != before


def test_weights_are_read_once_and_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = copy.deepcopy(tiny("llama")), []
    checksum = module._checksum
    monkeypatch.setattr(module, "_checksum", lambda tensor: read.append(tensor) or checksum(tensor))  # type: ignore[func-returns-value]
    before = fingerprint(model)
    once = len(read)
    assert fingerprint(model) == before and len(read) == once
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(2, 9)[None]).logits.sum().backward()
    optimizer.step()
    trained = fingerprint(model)
    assert trained != before and len(read) == 2 * once
    model.load_state_dict(tiny("llama").state_dict())
    assert fingerprint(model) == before
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight + 1)
    assert fingerprint(model) != before
    model.model.norm.weight.data.mul_(2)  # which torch does not count: the sample shows it
    assert fingerprint(model) not in (before, trained)


def test_a_tokenizers_fingerprint_tells_how_text_is_split(tmp_path: Path) -> None:
    found = {
        fingerprint_of_tokenizer(read_model(written(tmp_path / "a.gguf"), pre).tokenizer)
        for pre in (None, "gpt-2", "smollm", "dbrx", "llama-bpe")
    }
    assert len(found) == 5, "dbrx and llama-bpe differ in whether they merge whole words, too"
    same = [fingerprint_of_tokenizer(read_model(tmp_path / "a.gguf", "smollm").tokenizer) for _ in range(2)]
    assert same[0] == same[1] in found
