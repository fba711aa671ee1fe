"""The reader of headers gives what gguf's own reader gives, for whole and for split files, and refuses damaged ones."""

from __future__ import annotations

import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFWriter
from gguf_files import written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvkeep.errors import KvkeepError, ModelError
from kvkeep.models.gguf.header import read_header
from kvkeep.models.gguf.model import read_model


def plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_keys_and_tensors_are_those_of_ggufs_reader(tmp_path: Path) -> None:
    file = written(
        tmp_path / "a.gguf", keys={"general.tags": ["a", "é"], "general.name": "x", "test.half": [0.5, -2.0]}
    )
    found, wanted = read_header(file), GGUFReader(file)
    stated = {name: field.contents() for name, field in wanted.fields.items() if not name.startswith("GGUF.")}
    assert {name: plain(value) for name, value in found.metadata.items()} == stated
    assert [(one.name, one.size, one.offset, *one.shape) for one in found.tensors.values()] == [
        (one.name, one.n_bytes, one.data_offset, *map(int, reversed(one.shape))) for one in wanted.tensors
    ]


@pytest.mark.parametrize("name", ["m-00000-of-00000.gguf", "m-00005-of-00002.gguf", "m-00000-of-00002.gguf"])
def test_a_name_that_numbers_no_part_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is of no part of a model"):
        read_header(written(tmp_path / "m.gguf").rename(tmp_path / name))


def test_parts_of_a_file_are_read_as_one(tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", split=4)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    whole = read_header(written(tmp_path / "whole.gguf"))
    for part in parts:
        found = read_header(part)
        assert {one.file for one in found.tensors.values()} == {*parts} and found.tensors.keys() == whole.tensors.keys()
    parts[1].rename(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"has 3 parts, and m-00002-of-00003\.gguf is missing beside it"):
        read_header(parts[0])
    with pytest.raises(ModelError, match="states that it is part 2 of 3 of a model, and its name does not say so"):
        read_header(tmp_path / "other.gguf")
    shutil.copy(parts[0], parts[1])
    with pytest.raises(ModelError, match="is part 1 of 3"):
        read_header(parts[0])


def test_a_key_in_a_later_part_alone_is_refused(tmp_path: Path) -> None:
    """Nothing would read it."""
    written(tmp_path / "m.gguf", split=4)
    part = GGUFWriter(tmp_path / "m-00003-of-00003.gguf", "llama")
    for key, value in (("split.no", 2), ("split.count", 3), ("llama.logit_scale", 7)):
        part.add_uint16(key, value)
    part.write_header_to_file()
    part.write_kv_data_to_file()
    part.close()
    with pytest.raises(ModelError, match=r"Part 3 of .* states llama.logit_scale, and the first part does not"):
        read_header(tmp_path / "m-00001-of-00003.gguf")


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "big.gguf", "llama", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    good = written(tmp_path / "good.gguf").read_bytes()
    files = {
        "empty.gguf": (b"", "cannot be read"),
        "text.gguf": (b"hello, this is no model at all", "is not a GGUF file"),
        "old.gguf": (good[:4] + struct.pack("<I", 1) + good[8:], "has version 1 of the format"),
        "kinds.gguf": (good.replace(b"token_embd.weight\2\0\0\0", b"token_embd.weight\7\0\0\0"), "has 7 dimensions"),
    }
    for name, (content, sentence) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=sentence):
            read_header(tmp_path / name)
    with pytest.raises(ModelError, match="is big-endian, and kvkeep reads little-endian files"):
        read_header(tmp_path / "big.gguf")


@pytest.mark.parametrize("keep", [20, 40, 400, 1_000, -100])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    file = written(tmp_path / "cut.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(
        ModelError, match=r"is cut short: it has [\d,]+ bytes and needs at least [\d,]+; fetch it again"
    ):
        read_header(file)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 1_400), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_is_read_or_refused_with_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Path, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(tiny_gguf.read_bytes())
    for place, value in changes:
        data[place] = value
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes(data)
    try:
        _ = read_model(file).tokenizer
    except KvkeepError as error:
        assert re.fullmatch(r"[^\n]{10,700}", str(error)), str(error)
