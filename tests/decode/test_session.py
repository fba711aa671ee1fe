"""A cache saved and loaded goes on as if it had never left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from safetensors.torch import save_file

from kvkeep import KeepCache, Session, SessionError, load_session, save_session

VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "full", {}),
    ("llama", "static", {"budget": 100}),
    ("llama", "kv-direct", {"budget": 16, "checkpoint": "kv", "where": "disk"}),
    ("llama", "kv-direct", {"budget": 0, "checkpoint": "kv", "where": "host", "capacity": 200}),
    ("gpt2", "kv-direct", {"budget": "16tok", "checkpoint": "residual", "where": "host"}),
    ("qwen3", "kv-direct", {"budget": 16, "checkpoint": "residual:2", "where": "host"}),
    ("phi3", "kv-direct", {"budget": 16, "checkpoint": "tokens", "where": "device"}),
    ("gemma3", "full", {}),
    ("gemma3", "kv-direct", {"budget": 16, "checkpoint": "tokens", "where": "device"}),
    ("deepseek_v3", "kv-direct", {"budget": 16, "checkpoint": "kv", "where": "host"}),
    ("llama", "h2o", {"budget": 16}),
    ("gemma3", "streaming-llm:positions=absolute", {"budget": 16}),
    ("llama", "snapkv:window=4+checkpoint:kv", {"budget": 16, "where": "disk"}),
    ("llama", "tova+checkpoint:kv", {"budget": 16, "where": "host", "capacity": 20}),
    ("phi3", "h2o+checkpoint:tokens", {"budget": 16, "where": "device"}),
]


def step(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache, logits_to_keep=1).logits


@pytest.mark.parametrize(("family", "method", "options"), VARIANTS)
def test_goes_on_as_if_it_had_never_left(tmp_path: Path, family: str, method: str, options: dict[str, Any]) -> None:
    model, ids = tiny(family), torch.randint(2, 97, (2, 50), generator=torch.Generator().manual_seed(0))
    cache = KeepCache(model, method, **options)
    step(model, cache, ids[:, :40])
    save_session(tmp_path / "s", Session(cache, ids[:, :40].tolist(), {"who": "me"}))
    again = load_session(tmp_path / "s", model)
    assert again.ids == ids[:, :40].tolist() and again.notes == {"who": "me"}
    assert again.cache.get_seq_length() == 40
    assert again.cache.describe() == cache.describe()
    for low in (40, 43, 46):
        torch.testing.assert_close(
            step(model, again.cache, ids[:, low : low + 3]), step(model, cache, ids[:, low : low + 3])
        )
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_embeddings_are_saved_too(tmp_path: Path) -> None:
    model, ids = tiny("llama"), torch.arange(2, 60).unsqueeze(0)
    cache = KeepCache(model, "kv-direct", 16, checkpoint="tokens")
    step(model, cache, ids[:, :20])
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(ids[:, 20:50]) * 1.5, past_key_values=cache)
    save_session(tmp_path / "s", Session(cache, ids[:, :50].tolist()))
    again = load_session(tmp_path / "s", model).cache
    torch.testing.assert_close(step(model, again, ids[:, 50:52]), step(model, cache, ids[:, 50:52]))


def test_another_model_is_refused(tmp_path: Path) -> None:
    cache = KeepCache(tiny("llama"), "full")
    step(tiny("llama"), cache, torch.arange(2, 9).unsqueeze(0))
    save_session(tmp_path / "s", Session(cache, [list(range(2, 9))]))
    with pytest.raises(SessionError, match="another model"):
        load_session(tmp_path / "s", tiny("mistral"))


@pytest.mark.parametrize("size", [0, 7, 200, -1])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, size: int) -> None:
    cache = KeepCache(tiny("llama"), "full")
    step(tiny("llama"), cache, torch.arange(2, 9).unsqueeze(0))
    save_session(tmp_path / "s", Session(cache, [list(range(2, 9))]))
    (tmp_path / "s").write_bytes((tmp_path / "s").read_bytes()[:size])
    with pytest.raises(SessionError, match="damaged or cut short"):
        load_session(tmp_path / "s", tiny("llama"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(SessionError, match="not a session"):
        load_session(tmp_path / "other", tiny("llama"))
    with pytest.raises(SessionError, match="no such file"):
        load_session(tmp_path / "none", tiny("llama"))


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KeepCache(tiny("llama"), "full")
    step(tiny("llama"), cache, torch.arange(2, 9).unsqueeze(0))
    (tmp_path / "s").write_text("before")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SessionError, match="no space left"):
        save_session(tmp_path / "s", Session(cache, [list(range(2, 9))]))
    assert (tmp_path / "s").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
