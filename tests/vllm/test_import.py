"""The package costs nothing until its connector is asked for, which only vLLM does."""

from __future__ import annotations

import subprocess
import sys


def test_importing_it_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, kvkeep.vllm; print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
