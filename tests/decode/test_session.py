"""Session files: what they hold, what is refused, and what a failed write leaves. That a cache goes on as if it had
never been saved is in the contract (``tests/test_contract.py``), for every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from helpers import step
from safetensors.torch import save_file

from kvkeep import KeepCache, Session, SessionError, load_session, save_session


def test_embeddings_are_saved_too(tmp_path: Path) -> None:
    model, ids = tiny("llama"), torch.arange(2, 60).unsqueeze(0)
    cache = KeepCache(model, "kv-direct", 16, checkpoint="tokens")
    step(model, cache, ids[:, :20])
    step(model, cache, model.get_input_embeddings()(ids[:, 20:50]).detach() * 1.5)
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
