"""Places of checkpoints: unnamed files, and errors."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from forked import exit_codes

from kvkeep import StoreError, UsageError
from kvkeep.memory import places
from kvkeep.memory.places import Disk, place

CPU = torch.device("cpu")


def test_disk_memory_is_mapped_from_unnamed_files_of_the_folder(tmp_path: Path) -> None:
    tensor = Disk(tmp_path).allocate((1024, 1024), torch.float32)
    tensor.fill_(7)
    assert tensor.shape == (1024, 1024) and tensor.sum() == 7 * 1024**2 and list(tmp_path.iterdir()) == []
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) in maps.read_text()


def test_no_file_is_left_after_a_kill(tmp_path: Path) -> None:
    def filled() -> None:
        Disk(tmp_path).allocate((1 << 20,), torch.float32).fill_(1)
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_codes(filled) == [-signal.SIGKILL]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "words"), [("nowhere", "nowhere.*no such file"), ("file", "not a directory")])
def test_a_path_that_is_no_folder_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=words):
        Disk(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="permission denied"):
        Disk(tmp_path)


def test_its_own_folder_is_made_again_and_another_one_is_missed(tmp_path: Path) -> None:
    own, other = Disk(), Disk(tmp_path / "..")
    own.folder.rmdir()
    assert own.allocate((4, 5), torch.float32).fill_(2).sum() == 40
    own.folder.rmdir()
    again = Disk()  # as for a cache that is reset
    assert again.allocate((4, 5), torch.float32).shape == (4, 5)
    other.folder = tmp_path / "gone"
    with pytest.raises(StoreError, match="no such file"):
        other.allocate((1, 1), torch.float32)


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(StoreError, match="the disk is full"):
        disk.allocate((10,), torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_a_process_with_too_many_mappings_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    disk = Disk(tmp_path)
    monkeypatch.setattr(places, "map_file", full)
    with pytest.raises(StoreError, match="has reached the system's limit of mappings, .* raise vm.max_map_count"):
        disk.allocate((1, 64), torch.float32)


def test_an_unknown_place_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match="did you mean disk"):
        place("dsk", CPU)
