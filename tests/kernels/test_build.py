"""Kernels are compiled once a machine; where they cannot be, torch does all and it is said why."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvkeep import KeepCache
from kvkeep.kernels import build
from kvkeep.models.folders import cache_folder
from kvkeep.models.loading import load

BRIEF = 'extern "C" int kk_native() { return 1; }\n' + "".join(
    f'extern "C" void {name}() {{}}\n' for name in build.SIGNATURES
)


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test decides anew whether there are kernels; others go on with those there were."""
    before = build.library()
    monkeypatch.setenv("KVKEEP_CACHE", str(tmp_path / "cache"))
    build.library.cache_clear()
    yield
    build.library.cache_clear()
    if before is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("KVKEEP_KERNELS", raising=False)
            patch.setattr(build, "_built", lambda: before._name)
            build.library()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first of two sources, which are compiled in a moment."""
    path, other = tmp_path / "brief.cpp", tmp_path / "other.cpp"
    path.write_text(BRIEF)
    other.write_text('extern "C" int other() { return 2; }')
    monkeypatch.setattr(build, "SOURCES", [path, other])
    return path


def made() -> list[Path]:
    """What was compiled."""
    return sorted((cache_folder() / "kernels").glob("*.so"))


needs_compiler = pytest.mark.skipif(
    not any(map(build.shutil.which, build.COMPILERS)), reason="no compiler on this machine"
)


def test_without_a_compiler_torch_does_all(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.WARNING):
        assert build.library() is None
    assert "no compiler" in caplog.text and not made()
    model = load(model_folder, weights="int8", device="cpu").model
    cache = KeepCache(model, "window+checkpoint:kv", budget=16, where="host")
    with torch.no_grad():
        ids = torch.arange(2, 42)[None]
        ours, plain = model(ids, past_key_values=cache).logits, model(ids).logits
    assert torch.cosine_similarity(ours.float(), plain.float(), dim=-1).min() > 0.999
    assert not any(report.same_bits for report in cache.describe())


def test_without_a_folder_to_keep_them_torch_does_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("KVKEEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with caplog.at_level(logging.WARNING):
        assert build.library() is None
    assert "set KVKEEP_CACHE to a folder" in caplog.text


def test_kernels_are_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_KERNELS", "0")
    assert build.library() is None and not made()


@needs_compiler
def test_a_source_that_does_not_compile_is_named(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.write_text("this is no program")
    with caplog.at_level(logging.WARNING):
        assert build.library() is None
    assert "cannot be built" in caplog.text and "brief.cpp" in caplog.text
    assert not [*(cache_folder() / "kernels").iterdir()]
    build.library.cache_clear()
    source.write_text(BRIEF)
    assert (library := build.library()) is not None and library.other() == 2 and library.kk_native() == 1


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_no_reason_to_fail(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = build._built()
    path.write_bytes(b"half a file")
    with caplog.at_level(logging.WARNING):
        assert build.library() is None
    assert "cannot be built" in caplog.text


@needs_compiler
def test_a_library_is_compiled_once_for_flags_sources_and_processor(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build._built()
    with monkeypatch.context() as patch:
        patch.setattr(build.subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled again"))
        patch.setenv("PATH", "")  # nor is a compiler asked for
        assert build._built() == first and made() == [first]
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    other = build._built()
    source.write_text(BRIEF + "\n")
    third = build._built()
    monkeypatch.setattr(build, "_processor", lambda: "another one")
    assert len({first, other, third, build._built()}) == 4


@needs_compiler
def test_two_processes_compile_at_once(source: Path, tmp_path: Path) -> None:
    """Both get a whole library, and nothing is left beside it."""
    program = (
        "from pathlib import Path; from kvkeep.kernels import build; "
        f"build.SOURCES = [Path({str(source)!r})]; print(build.library() is not None)"
    )
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=100)[0].strip() for process in both] == ["True", "True"]
    assert [*(cache_folder() / "kernels").iterdir()] == made() and len(made()) == 1
