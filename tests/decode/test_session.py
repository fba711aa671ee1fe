"""Session files: what they hold, what is refused, and what a failed write leaves. That a cache goes on as if it had
never been saved is in the contract (``tests/test_contract.py``), for every method."""

from __future__ import annotations

from pathlib import Path

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


def test_other_files_and_those_of_another_model_are_refused(tmp_path: Path) -> None:
    cache = KeepCache(tiny("llama"), "full")
    step("llama", cache, torch.arange(2, 9).unsqueeze(0))
    save_session(tmp_path / "s", Session(cache, [list(range(2, 9))]))
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    save_file({"x": torch.zeros(1)}, tmp_path / "former", {"kvkeep": "{}", "format": "2"})
    whole = (tmp_path / "s").read_bytes()
    for size in (0, 7, 200, -1):
        (tmp_path / str(size)).write_bytes(whole[:size])
    for name, family, sentence in (
        ("s", "mistral", "another model"),
        ("other", "llama", "not a session"),
        ("none", "llama", "no such file"),
        *((size, "llama", "first turn was never saved") for size in ("0", "7", "200", "-1")),
        ("former", "llama", "another version"),
    ):
        with pytest.raises(SessionError, match=sentence):
            load_session(tmp_path / name, tiny(family))
