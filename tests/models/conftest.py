"""A tiny GGUF file, and model folders that have something wrong with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import written


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer whose tokens are letters, as llama.cpp's tools would write it."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    written(path)
    return path


@pytest.fixture
def gguf_file(tiny_gguf: Path, tmp_path: Path) -> Path:
    """A copy of the tiny GGUF file that a test may spoil."""
    return Path(shutil.copy(tiny_gguf, tmp_path / "mine.gguf"))


@pytest.fixture
def spoiled(model_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A maker of copies of the tiny model's folder without some files, or with another config.json."""

    def make(*without: str, config: dict[str, object] | None = None) -> Path:
        folder = tmp_path / "spoiled"
        shutil.copytree(model_folder, folder)
        for name in without:
            (folder / name).unlink()
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make
