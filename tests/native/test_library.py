"""How Python finds the native library and chooses a path; threads and float modes of the caller."""

from __future__ import annotations

import ast
import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep import KeepCache
from kvkeep.errors import UsageError
from kvkeep.models.loading import load
from kvkeep.native import library as native
from kvkeep.native import structures

SOURCES = Path(native.__file__).parents[1]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test looks for the library anew; other tests keep the path that they had."""
    before = native.library()
    path = native.path()
    monkeypatch.delenv("KVKEEP_CPU", raising=False)
    forget()
    yield
    monkeypatch.undo()
    forget()
    if before is not None:
        native.kernels().kvkeep_choose(path.encode())


def forget() -> None:
    native.library.cache_clear()
    native._loaded.cache_clear()


def paths() -> list[str]:
    """The paths of this machine, best first."""
    found = native.library()
    return [] if found is None else found.kvkeep_paths().decode().split()


def norm_by(weight: torch.Tensor, eps: float = 1e-6) -> int:
    """The address of an RMSNorm, which lives as long as its weight."""
    weight.norm = structures.KvNorm(structures.array(weight), eps=eps)  # type: ignore[attr-defined]
    return structures.address_of(weight.norm)  # type: ignore[attr-defined]


def normed(rows: int = 64) -> torch.Tensor:
    """What the kernel makes of some rows."""
    x = torch.linspace(-3, 3, rows * 96).view(rows, 96).bfloat16()
    weight, out = torch.linspace(0.5, 2, 96), torch.empty(rows, 96, dtype=torch.bfloat16)
    native.kernels().kvkeep_norm(norm_by(weight), x, out)
    return out


def interpreted(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


# ---- which path ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
def test_the_best_path_is_the_default_and_any_other_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.path() == paths()[0] and "plain" in paths()
    expected = normed()
    for name in paths():
        forget()
        monkeypatch.setenv("KVKEEP_CPU", name)
        assert native.path() == name
        assert torch.equal(normed(), expected)
    monkeypatch.delenv("KVKEEP_CPU")
    assert native.path() == paths()[0]  # an earlier choice does not persist


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["nonsense", "\udcff"])  # the second is a byte that is no UTF-8
def test_a_path_that_the_processor_lacks_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ", ".join([*paths(), "torch"])
    forget()
    monkeypatch.setenv("KVKEEP_CPU", name)
    for call in (native.check_environment, native.library, native.library):
        with pytest.raises(UsageError, match=f"KVKEEP_CPU={name}: this machine cannot run '{name}'. It runs {here}"):
            call()


def test_choosing_torch_logs_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KVKEEP_CPU", "torch")
    native.check_environment()
    assert native.library() is None and native.path() == "torch" and not caplog.text


# ---- a library that cannot be used -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "why"), [(b"", "was not built"), (b"half a file", "cannot be used")])
def test_a_missing_or_unusable_library_is_logged_once_and_torch_computes(
    content: bytes,
    why: str,
    tmp_path: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(native, "FILE", tmp_path / "libkvkeep.so")
    if content:
        native.FILE.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert native.library() is None and native.library() is None
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith(f"The native library {why}")
    assert message.endswith(f". kvkeep computes with torch, {native.SLOWDOWN}.")
    model = load(model_folder, weights="int8", device="cpu").model
    cache = KeepCache(model, "window+checkpoint:kv", budget=16, where="host")
    with torch.no_grad():
        ids = torch.arange(2, 42)[None]
        ours, plain = model(ids, cache=cache).logits, model(ids).logits
    assert torch.cosine_similarity(ours.float(), plain.float(), dim=-1).min() > 0.999
    assert not any(report.same_bits for report in cache.describe())
    forget()
    monkeypatch.setenv("KVKEEP_CPU", "avx2")
    with pytest.raises(UsageError, match=f"^KVKEEP_CPU=avx2 needs the native library, which {why}\\.$"):
        native.path()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("damage", [lambda data: data[:100_000], lambda data: data[:-20_000], "zeros"])
def test_a_damaged_library_is_not_loaded(damage: Any, tmp_path: Path) -> None:
    """Loading a truncated file would end the process by a signal."""
    data = native.FILE.read_bytes()
    half = len(data) // 2
    damaged = tmp_path / native.FILE.name
    damaged.write_bytes(data[:half] + bytes(4096) + data[half + 4096 :] if damage == "zeros" else damage(data))
    damaged.with_suffix(".sha256").write_text(hashlib.sha256(data).hexdigest() + "\n")
    program = (
        "import pathlib, sys; from kvkeep.native import library as native\n"
        "native.FILE = pathlib.Path(sys.argv[1]); print(native.path())"
    )
    done = interpreted(program, str(damaged))
    assert done.stdout.strip() == "torch" and "its file is damaged" in done.stderr, done


@pytest.mark.usefixtures("kernels")
def test_a_library_of_another_header_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget()
    monkeypatch.setattr(native, "INTERFACE", "0" * 64)
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert "it was built for another kvkeep; install kvkeep again" in caplog.text


# ---- the header ------------------------------------------------------------------------------------------------------

HEADER = native.FILE.with_name("kvkeep.h")
OFFSETS = """
#include <cstddef>
#include <cstdio>
#include "kvkeep.h"
int main() { %s }
"""


@pytest.mark.skipif(not shutil.which("c++"), reason="no compiler here")
def test_python_reads_the_header_as_a_compiler_does(tmp_path: Path) -> None:
    """Constants, sizes of structures, and where each field lies."""
    made = [one for one in vars(structures).values() if isinstance(one, type) and issubclass(one, ctypes.Structure)]
    expected = [str(value) for value in structures.CONSTANTS.values()]
    asked = [*structures.CONSTANTS]
    for one in made:
        expected += [str(ctypes.sizeof(one)), *(str(getattr(one, field[0]).offset) for field in one._fields_)]
        asked += [f"sizeof({one.__name__})", *(f"offsetof({one.__name__}, {field[0]})" for field in one._fields_)]
    source = tmp_path / "offsets.cpp"
    source.write_text(OFFSETS % " ".join(f'printf("%d\\n", int({one}));' for one in asked))
    subprocess.run(["c++", f"-I{HEADER.parent}", str(source), "-o", str(tmp_path / "offsets")], check=True)
    found = subprocess.run([str(tmp_path / "offsets")], capture_output=True, text=True, check=True).stdout.split()
    assert len(made) == 15 and dict(zip(asked, found, strict=True)) == dict(zip(asked, expected, strict=True))


def test_every_field_and_function_of_the_header_is_explained() -> None:
    header = HEADER.read_text(encoding="utf-8")
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \w+;", header, re.DOTALL):
        for field, *_ in getattr(structures, name)._fields_:
            assert re.search(rf"\b{field}(\[\d\])?; +/\* \S", body), f"{name}.{field}"
    for function in structures.functions():
        assert re.search(rf"\*/\n[^\n]*\b{function}\(", header), function


def test_an_unknown_field_of_a_structure_cannot_be_set() -> None:
    for structure in (
        structures.KvLayer,
        structures.KvMlp,
        structures.KvPiece,
        structures.KvAttention,
        structures.KvStep,
    ):
        with pytest.raises(AttributeError):
            structure().nonsense = 1  # type: ignore[attr-defined]


# ---- threads and float modes -----------------------------------------------------------------------------------------


PROGRAM = """
import os, sys, torch
from kvkeep.native import library as native, structures

def normed():
    x, weight = torch.linspace(-3, 3, 28800).view(300, 96).bfloat16(), torch.ones(96)
    out, norm = torch.empty_like(x), structures.KvNorm(structures.array(weight), eps=1e-6)
    native.kernels().kvkeep_norm(structures.address_of(norm), x, out)
    return out.view(torch.int16).tolist()

torch.set_num_threads(3)
if sys.argv[1] == "own":
    native.kernels().kvkeep_use_openmp(None, None)
expected = normed()
child = os.fork()
if not child:
    os._exit(0 if all(normed() == expected for _ in range(50)) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), normed() == expected)
"""


@pytest.mark.turns(3)
@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("threads", ["torch", "own"])
def test_a_forked_child_can_use_threads(threads: str) -> None:
    """The parent's threads do not exist in the child, which would wait for them forever. Torch's own operations do so
    from some 30,000 elements on; here are fewer."""
    done = interpreted(PROGRAM, threads, PYTHONWARNINGS="ignore")
    assert done.stdout.split() == ["0", "True"], done.stderr


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rows", [1, 400])
def test_subnormal_numbers_are_kept_whatever_the_programs_float_mode(rows: int) -> None:
    """The sum of squares is normal, but the result is not."""
    x = torch.full((rows, 16), 2.0**-20).bfloat16()
    weight, out = torch.full((16,), 2.0**-130), torch.empty_like(x)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor does not flush")
        native.kernels().kvkeep_norm(norm_by(weight, 0.0), x, out)
        assert torch.tensor([1e-40]).mul(1.0).item() == 0.0  # the program's own mode is as it was
    finally:
        torch.set_flush_denormal(False)
    assert out.view(torch.int16).eq(8).all()  # 2^-130: 8 times the smallest


# ---- what the library and the package are made of --------------------------------------------------------------------


def test_no_other_module_imports_ctypes() -> None:
    found = set()
    for source in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            names: list[Any] = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            if any(name and name.partition(".")[0] == "ctypes" for name in names):
                found.add(source.relative_to(SOURCES).as_posix())
    assert found == {"native/library.py", "native/room.py", "native/structures.py"}


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("readelf"), reason="no readelf on this machine")
def test_the_library_exports_its_interface_and_needs_no_runtime_of_a_compiler() -> None:
    def lines(*options: str) -> list[str]:
        command = ["readelf", "--wide", *options, str(native.FILE)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    symbols = [line.split() for line in lines("--dyn-syms")]
    exported = {row[7] for row in symbols if len(row) == 8 and row[4] in ("GLOBAL", "WEAK") and row[6].isdigit()}
    assert exported == set(structures.functions())
    needed = {found[1] for line in lines("--dynamic") if (found := re.search(r"\(NEEDED\).*\[(\w+)", line))}
    assert needed <= {"libc", "libm", "libpthread", "ld"}
