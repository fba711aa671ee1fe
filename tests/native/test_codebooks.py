"""The codebooks of the native library are those of the package gguf."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_codebooks_are_what_their_tool_writes() -> None:
    made: str = runpy.run_path(str(ROOT / "tools" / "codebooks.py"))["source"]()
    assert made == (ROOT / "src" / "kvkeep" / "native" / "codebooks.cpp").read_text("utf-8")
