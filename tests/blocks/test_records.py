"""Tests of records: small JSON objects by owner and name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvkeep.blocks import records
from kvkeep.blocks.records import Records


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff", None])
def test_a_damaged_record_is_none(content: bytes | None, tmp_path: Path) -> None:
    Records(tmp_path).of("one").put("name", {"ids": [1, 2]})
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"1", b"3") if content is None else content)
    assert Records(tmp_path).of("one").get("name") is None


def test_a_record_is_read_by_its_owner_and_name_only(tmp_path: Path) -> None:
    Records(tmp_path).of("one").put("name", {"ids": [1]})
    (path,) = files(tmp_path)
    (tmp_path / "two").mkdir()
    shutil.copy(path, tmp_path / "two" / path.name)
    assert Records(tmp_path).of("two").get("name") is None
    assert Records(tmp_path).of("one").get("name") == {"ids": [1]}


def test_what_cannot_be_removed_keeps_no_other_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Any] = {"text": "x" * 1000}
    known = Records(tmp_path)
    for number in range(4):
        known.of("one").put(str(number), kept)
    for path in files(tmp_path):
        os.utime(path, (1000, 1000))
    (tmp_path / "one" / "folder" / "inner").mkdir(parents=True)
    os.utime(tmp_path / "one" / "folder", (0, 0))
    (tmp_path / "one" / "link").symlink_to(tmp_path / "nothing")
    monkeypatch.setattr(records, "MAX_BYTES", 100)
    known.evict(None)
    assert not [path for path in files(tmp_path) if path.is_file()]


def test_a_record_over_the_age_is_not_in_memory_either(tmp_path: Path) -> None:
    known = Records(tmp_path)
    for name in ("old", "new"):
        known.of("one").put(name, {"name": name})
    known.of("one").get("old")
    (old,) = [path for path in files(tmp_path) if b"old" in path.read_bytes()]
    os.utime(old, (1000, 1000))
    known.evict(age=3600)
    assert known.of("one").get("old") is None and known.of("one").get("new") == {"name": "new"}


def test_a_record_that_is_used_from_memory_is_not_over_the_age(tmp_path: Path) -> None:
    known = Records(tmp_path)
    known.of("one").put("name", {"ids": [1]})
    os.utime(files(tmp_path)[0], (1000, 1000))
    known.of("one").get("name")
    known.evict(age=3600)
    assert Records(tmp_path).of("one").get("name") == {"ids": [1]}


def test_all_records_can_be_removed(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.of("one").put("a", {"x": 1})
    records.clear()
    assert records.of("one").get("a") is None and not [path for path in tmp_path.rglob("*") if path.is_file()]
    records.of("one").put("a", {"x": 2})
    assert Records(tmp_path).of("one").get("a") == {"x": 2}
