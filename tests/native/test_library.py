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


def normed(rows: int = 64) -> torch.Tensor:
    """What the kernel makes of some rows."""
    x = torch.linspace(-3, 3, rows * 96).view(rows, 96).bfloat16()
    weight, out = torch.linspace(0.5, 2, 96), torch.empty(rows, 96, dtype=torch.bfloat16)
    native.kernels().kvkeep_norm(x.data_ptr(), weight.data_ptr(), 1e-6, rows, 96, out.data_ptr())
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


def test_the_command_line_refuses_an_unknown_path_before_importing_torch() -> None:
    program = "import sys; from kvkeep.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = interpreted(program, "generate", "--prompt", "x", KVKEEP_CPU="nonsense")
    assert done.returncode == 2 and done.stdout.strip() == "False"
    assert re.fullmatch(
        r"kvkeep: KVKEEP_CPU=nonsense: this machine cannot run 'nonsense'\. It runs .*torch\.\n", done.stderr
    )


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
@pytest.mark.parametrize("name", ["KvStep", *structures.CONSTANTS, "KV_NEW"])
def test_a_library_with_other_structures_or_constants_is_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget()
    if name == "KvStep":
        swapped = [*structures.KvStep._fields_[:-2], *structures.KvStep._fields_[:-3:-1]]  # two fields of the same size
        other = type(name, (ctypes.Structure,), {"_fields_": swapped})
        monkeypatch.setattr(native, "STRUCTURES", (*structures.STRUCTURES[:-1], other))
        start = structures.KvStep.first_lane.offset
        why = rf"KvStep\.token_lanes is 8 bytes at {start + 8}, not 8 bytes at {start}"
    else:
        monkeypatch.setitem(structures.CONSTANTS, name, 77)
        why = rf"{name} is {'missing' if name == 'KV_NEW' else '[0-9]+'}, not 77"
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert re.search(f"{why}; install kvkeep again", caplog.text)


# ---- the header ------------------------------------------------------------------------------------------------------

HEADER = native.FILE.with_name("kvkeep.h").read_text(encoding="utf-8")
LAYOUT = native.FILE.with_name("layout.cpp").read_text(encoding="utf-8")
DECLARED = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
REPORTED = ("KvField", "KvNumber")
"""Structures that the library itself returns."""
C_TYPES = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}


def declared_structures() -> dict[str, dict[str, Any]]:
    """The fields of every structure of kvkeep.h, and their types as Python has them."""
    found = {}
    for name, body in re.findall(r"typedef struct (Kv\w+) \{(.*?)\} Kv\w+;", DECLARED, re.DOTALL):
        found[name] = {}
        for statement in body.split(";")[:-1]:
            kind, field, _, count = re.fullmatch(r"\s*(.*?)\s*(\w+)(\[(\d+)\])?", statement, re.DOTALL).groups()
            made = ctypes.c_char_p if name in REPORTED else ctypes.c_void_p
            made = made if kind.endswith("*") else C_TYPES.get(kind) or getattr(structures, kind)
            found[name][field] = made * int(count) if count else made
    return found


def test_structures_equal_those_of_the_header() -> None:
    """kvkeep.h, Python, and the list in layout.cpp have the same fields in the same order."""
    expected = declared_structures()
    by_name = {structure.__name__: structure for structure in (*structures.STRUCTURES, structures.KvField)}
    assert {*expected} == {*by_name, "KvNumber"}
    for name, fields in expected.items():
        assert dict(getattr(structures, name)._fields_) == fields, name
        listed = re.findall(rf"FIELD\({name}, (\w+)\)", LAYOUT)
        assert listed == ([] if name in REPORTED else [*fields]), name


def test_constants_equal_those_of_the_header() -> None:
    declared = {
        name for body in re.findall(r"enum \w+ \{(.*?)\}", DECLARED, re.DOTALL) for name in re.findall(r"KV_\w+", body)
    }
    assert {*structures.CONSTANTS} == {*re.findall(r"NUMBER\((KV_\w+)\)", LAYOUT)} == declared - {"KV_KINDS"}


def test_signatures_equal_those_of_the_header() -> None:
    letters = {"int64_t": "l", "int": "i", "float": "f", "void": "", "KvStatus": "e"}
    declared = {}
    for result, name, arguments in re.findall(
        r"^([\w ]+?[ *]+)(kvkeep_\w+)\((.*?)\);", DECLARED, re.MULTILINE | re.DOTALL
    ):
        types = [re.sub(r"\w+$", "", argument.strip()).strip() or argument for argument in arguments.split(",")]
        kinds = [
            ("s" if kind == "const char*" and name == "kvkeep_choose" else "p") if kind.endswith("*") else letters[kind]
            for kind in types
        ]
        back = ("s" if "char" in result else "p") if "*" in result else letters[result.strip()]
        declared[name] = "".join(kinds) + (f":{back}" if back else "")
    assert declared == native._SIGNATURES


def test_every_field_and_function_of_the_header_is_explained() -> None:
    for name, fields in declared_structures().items():
        body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", HEADER, re.DOTALL)
        assert body
        for field in fields:
            assert re.search(rf"\b{field}(\[\d\])?; +/\* \S", body[1]), f"{name}.{field}"
    for function in native._SIGNATURES:
        assert re.search(rf"\*/\n[^\n]*\b{function}\(", HEADER), function


def test_an_unknown_field_of_a_structure_cannot_be_set() -> None:
    for structure in structures.STRUCTURES:
        with pytest.raises(AttributeError):
            structure().nonsense = 1  # type: ignore[attr-defined]


# ---- threads and float modes -----------------------------------------------------------------------------------------


PROGRAM = """
import os, sys, torch
from kvkeep.native import library as native

def normed():
    x, weight = torch.linspace(-3, 3, 28800).view(300, 96).bfloat16(), torch.ones(96)
    out = torch.empty_like(x)
    native.kernels().kvkeep_norm(x.data_ptr(), weight.data_ptr(), 1e-6, 300, 96, out.data_ptr())
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
        native.kernels().kvkeep_norm(x.data_ptr(), weight.data_ptr(), 0.0, rows, 16, out.data_ptr())
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
    assert exported == set(native._SIGNATURES)
    needed = {found[1] for line in lines("--dynamic") if (found := re.search(r"\(NEEDED\).*\[(\w+)", line))}
    assert needed <= {"libc", "libm", "libpthread", "ld"}
