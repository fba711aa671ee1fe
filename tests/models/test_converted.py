"""Converted copies of GGUF files: complete or absent, and never damaged."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from forked import exit_codes

from kvkeep.errors import ModelError
from kvkeep.models import checksum, converted
from kvkeep.models.folders import cache_folder
from kvkeep.models.loading import load


def copies() -> list[Path]:
    folder = cache_folder() / "converted"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def make(gguf: Path) -> list[str]:
    """Convert ``gguf`` if need be, and return what was said about it."""
    said: list[str] = []
    converted.converted(gguf, said.append)
    return said


def test_a_gguf_file_is_converted_once(gguf_file: Path) -> None:
    said: list[str] = []
    first, second = (load(gguf_file, progress=said.append, device="cpu") for _ in range(2))
    assert said == ["Converting mine.gguf, once ..."]
    assert [Path(first.source)] == copies() == [Path(second.source)]
    ids = torch.tensor([[1, 5, 9]])
    assert torch.equal(first.model(ids).logits, second.model(ids).logits)


def test_the_converted_copy_equals_the_file(gguf_file: Path) -> None:
    from gguf import GGUFReader

    loaded = load(gguf_file, weights="float32", device="cpu")
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in GGUFReader(gguf_file).tensors}
    weights = loaded.model.state_dict()
    assert torch.equal(weights["model.embed_tokens.weight"], tensors["token_embd.weight"])
    assert torch.equal(weights["model.layers.0.self_attn.v_proj.weight"], tensors["blk.0.attn_v.weight"])
    assert loaded.tokenizer.chat_template == "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert (loaded.tokenizer.bos_token, loaded.tokenizer.eos_token) == ("<s>", "</s>")
    settings = loaded.model.generation_config
    assert (settings.eos_token_id, settings.pad_token_id, bool(settings.do_sample)) == (2, 2, False)
    assert not hasattr(loaded.model.config, "quantization_config")


def test_a_changed_file_gets_another_copy(gguf_file: Path) -> None:
    make(gguf_file)
    data = bytearray(gguf_file.read_bytes())
    data[-3] ^= 1  # within the last tensor
    gguf_file.write_bytes(data)
    assert make(gguf_file)
    assert len(copies()) == 2


@pytest.mark.parametrize(
    "spoil", ["cut", "flip", "flip unseen", "remove", "no manifest", "odd manifest", "odd files", "empty"]
)
def test_a_damaged_copy_is_converted_again(gguf_file: Path, spoil: str, caplog: pytest.LogCaptureFixture) -> None:
    """A copy with a new time only is kept."""
    make(gguf_file)
    (folder,) = copies()
    (folder / "tensors.json").touch()
    assert not make(gguf_file)
    table, manifest = folder / "tensors.json", folder / "kvkeep.json"
    intact, stat = table.read_bytes(), table.stat()
    if spoil == "cut":
        table.write_bytes(intact[:-4])
    elif spoil.startswith("flip"):
        table.write_bytes(intact[:-4] + bytes(byte ^ 255 for byte in intact[-4:]))
        if spoil == "flip unseen":  # a disk's own fault changes no time
            os.utime(table, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif spoil == "remove":
        (folder / "tokenizer.json").unlink()
    else:
        odd = {"no manifest": "", "odd manifest": "[1]", "odd files": '{"files": [1]}', "empty": '{"files": {}}'}
        manifest.write_text(odd[spoil])
    with caplog.at_level(logging.WARNING, "kvkeep"):
        assert make(gguf_file)
    assert "is damaged; converting again" in caplog.text
    assert copies() == [folder]
    assert table.read_bytes() == intact
    assert not make(gguf_file)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_an_interrupted_conversion_leaves_no_files(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    write = converted._write

    def interrupted(model: Any, tokenizer: Any, contents: Any, folder: Path) -> None:
        write(model, tokenizer, contents, folder)
        assert any(copies())  # so there is something to leave behind
        raise stop

    monkeypatch.setattr(converted, "_write", interrupted)
    with pytest.raises(stop):
        make(gguf_file)
    assert copies() == []


def test_leftovers_of_killed_processes_are_removed(gguf_file: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    models, host = cache_folder() / "converted", socket.gethostname()
    killed, living = models / f".scratch-{host}-{dead.pid}-aaaa", models / f".scratch-{host}-{os.getpid()}-bbbb"
    elsewhere, forgotten = models / f".scratch-else-where-{dead.pid}-cccc", models / ".scratch-else-where-1-dddd"
    for folder in (killed, living, elsewhere, forgotten):
        (folder / "model").mkdir(parents=True)
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(forgotten, (two_days_ago, two_days_ago))
    make(gguf_file)
    assert [folder.exists() for folder in (killed, living, elsewhere, forgotten)] == [False, True, True, False]


def test_a_conversion_overtaken_by_another_uses_its_copy(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = converted._write

    def overtaken(model: Any, tokenizer: Any, contents: Any, folder: Path) -> None:
        monkeypatch.setattr(converted, "_write", write)
        make(gguf_file)  # another process, as it were
        first.append(os.stat(copies()[-1] / "tensors.json").st_ino)
        write(model, tokenizer, contents, folder)

    first: list[int] = []
    monkeypatch.setattr(converted, "_write", overtaken)
    make(gguf_file)
    (folder,) = copies()
    assert (folder / "tensors.json").stat().st_ino == first[0]


def test_simultaneous_conversions_make_one_copy(gguf_file: Path) -> None:
    assert exit_codes(*[partial(make, gguf_file)] * 3) == [0, 0, 0]
    assert len(copies()) == 1 and not make(gguf_file)


def flipped(data: bytes) -> bytes:
    """One bit of the number of layers: transformers would make millions of them before it looked for their weights."""
    place = data.find(b"llama.block_count") + len(b"llama.block_count") + 7
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


CUT = r"is cut short: it has [\d,]+ bytes and needs at least [\d,]+; fetch it again\.$"
LACKING = "it lacks model.layers.0.self_attn.v_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        *((lambda data, keep=keep: data[:keep], CUT) for keep in (5, 100, 1000, -4000, -4)),
        *((lambda _, other=other: other, "is not a GGUF file") for other in (b"", b"GG", b"PK\3\4 not a model")),
        (flipped, "number of layers"),
        (lambda data: data.replace(b"blk.0.attn_v.weight", b"blk.0.attn_w.weight"), LACKING),
    ],
)
def test_a_spoiled_file_is_refused(gguf_file: Path, spoil: Callable[[bytes], bytes], sentence: str) -> None:
    gguf_file.write_bytes(spoil(gguf_file.read_bytes()))
    announced: list[str] = []
    with pytest.raises(ModelError, match=sentence) as refusal:
        load(gguf_file, progress=announced.append)
    assert "\n" not in str(refusal.value)
    assert not announced or sentence != CUT, "the size is checked before the conversion is announced"
    assert copies() == []


@pytest.mark.parametrize("key", ["block_count", "embedding_length"])
@pytest.mark.parametrize("value", [0, 2**20 + 1, 2**31])
def test_a_header_larger_than_the_file_is_refused_at_once(
    gguf_file: Path, key: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before memory is allocated for it."""
    data = gguf_file.read_bytes()
    at = data.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4  # behind the type of the value
    gguf_file.write_bytes(data[:at] + value.to_bytes(4, "little") + data[at + 4 :])
    monkeypatch.setattr(converted, "built", lambda *_, **__: pytest.fail("it was built"))
    with pytest.raises(ModelError, match="damaged") as refusal:
        load(gguf_file)
    assert "tensor" in str(refusal.value)


@pytest.mark.parametrize("fault", ["the disk is full", "no folder can be made"])
def test_an_unwritable_cache_folder_is_reported_as_such(
    gguf_file: Path, fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if fault == "the disk is full":
        full = Exception("No space left on device (os error 28)")  # as the library of tokenizers raises it
        monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", Mock(side_effect=full))
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("KVKEEP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="cannot write to its cache folder .* set KVKEEP_CACHE") as refusal:
        make(gguf_file)
    assert copies() == [] and ("No space left" in str(refusal.value)) == (fault == "the disk is full")


def test_the_cache_folder_may_be_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVKEEP_CACHE", "~/x")
    assert cache_folder() == tmp_path / "x"


def test_a_checksum_is_computed_again_only_after_a_change(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Path] = []
    real = checksum.sha256
    monkeypatch.setattr(checksum, "sha256", lambda path: taken.append(path) or real(path))
    assert checksum.remembered_sha256(gguf_file) == checksum.remembered_sha256(gguf_file) == real(gguf_file)
    assert len(taken) == 1
    gguf_file.write_bytes(gguf_file.read_bytes() + b"x")
    assert checksum.remembered_sha256(gguf_file) == real(gguf_file)
    assert len(taken) == 2
    text, facts = gguf_file.read_bytes(), gguf_file.stat()  # another file of the same size and time, as archives have
    gguf_file.write_bytes(text[:-1] + b"y")
    os.utime(gguf_file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert checksum.remembered_sha256(gguf_file) == real(gguf_file) and len(taken) == 3
    memory = cache_folder() / "gguf" / "checksums.json"
    assert list(json.loads(memory.read_text())) == [str(gguf_file)]
    for nonsense in ("", "[]", json.dumps({str(gguf_file): 5})):
        memory.write_text(nonsense)
        assert checksum.remembered_sha256(gguf_file) == real(gguf_file)
