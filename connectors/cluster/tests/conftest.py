"""The fixtures of kvkeep's own tests, and folders of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import _one_thread, kernels, model_folder, run

__all__ = ["_one_thread", "kernels", "model_folder", "run"]


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing a test writes lands in the user's folders."""
    folder: Path = tmp_path_factory.mktemp("own")
    for name in ("KVKEEP_CACHE", "KVKEEP_DATA"):
        monkeypatch.setenv(name, str(folder / name))
