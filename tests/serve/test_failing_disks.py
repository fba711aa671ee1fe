"""A disk that fails under one session of a server is that session's fault alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import NEW, Client, run, text
from conftest import tokenizer
from families import tiny
from storing import IDS, model

from kvkeep import KeepCache
from kvkeep.engine.batch import Read, forward
from kvkeep.errors import EntriesLost, StoreError
from kvkeep.memory import places
from kvkeep.memory.places import Disk
from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.errors import api_error


@pytest.mark.parametrize("checkpoint", ["kv", "residual"])
def test_a_full_disk_fails_one_read_of_a_row(checkpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, ids = tiny("llama"), text(40, 1)
    given: dict[str, Any] = {"where": "disk", "checkpoint": checkpoint}
    caches = [KeepCache(one, "kv-direct", 16, folder=tmp_path / name, **given) for name in _made(tmp_path, "ab")]
    whole = KeepCache(one, "kv-direct", 16, folder=tmp_path, **given)
    (wanted,) = forward(one, [Read(whole, ids)])
    allocate = Disk.allocate

    def full(self: Disk, *sizes: Any) -> torch.Tensor:
        if self.folder.name == "b":
            raise StoreError("The disk is full.")
        return allocate(self, *sizes)

    monkeypatch.setattr(Disk, "allocate", full)
    found, failed = forward(one, [Read(cache, ids) for cache in caches])
    assert isinstance(failed, StoreError) and isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, wanted)  # float32 depends on the number of rows
    monkeypatch.undo()
    caches[1].reset()
    (again,) = forward(one, [Read(caches[1], ids)])
    assert torch.equal(again, wanted)  # type: ignore[arg-type]


def _made(folder: Path, names: str) -> str:
    for name in names:
        (folder / name).mkdir()
    return names


@pytest.mark.usefixtures("kernels")
def test_a_session_that_lost_its_entries_gives_no_other_one_a_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request with the same beginning reads it, and is answered."""
    files: list[int] = []
    mapped = places.map_file

    def noting(descriptor: int, size: int) -> Any:
        files.append(os.dup(descriptor))
        return mapped(descriptor, size)

    monkeypatch.setattr(places, "map_file", noting)
    engine = Engine(Loaded(model(), tokenizer(), "tiny", "tiny"), 10**9, method="kv-direct", budget=32)
    ids = IDS[0, :400].tolist()
    first = Client(engine, ids)
    run(engine)
    for descriptor in files:
        os.ftruncate(descriptor, 0)
        os.close(descriptor)
    again, longer = Client(engine, ids), Client(engine, IDS[0, :420].tolist())
    run(engine)
    assert again.ended.tokens == first.ended.tokens and again.ended.cached == 0
    assert longer.ended.written == NEW
    engine.close()


def test_what_a_disk_does_is_told_without_its_paths() -> None:
    lost = api_error(EntriesLost())
    full = api_error(StoreError("Checkpoints cannot be kept in '/secret'."))
    assert (lost.status_code, lost.code) == (503, "entries_lost")
    assert (full.status_code, full.code) == (503, "store_unavailable")
    assert "/secret" not in full.detail
