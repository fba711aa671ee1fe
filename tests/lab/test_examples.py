"""The Python examples on the lab's pages run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import tiny
from test_docs import OF_THE_LAB, blocks, run_examples


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in OF_THE_LAB if blocks(page, "python")], ids=lambda page: page.name)
def test_python_examples_run(
    page: Path, smollm2: Any, registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny model with the vocabulary of the embedded one."""
    monkeypatch.chdir(tmp_path)
    run_examples(page, tiny("llama", positions=8192, vocabulary=len(smollm2.tokenizer)), smollm2.tokenizer)
