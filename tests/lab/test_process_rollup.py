"""Memory of a process, read from the system's file; against known bytes in tests/lab/test_process_memory.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvkeep_lab.process_rollup import ProcessMemory, current_process_memory

from kvkeep.errors import KvkeepError


def test_memory_is_read_from_the_systems_file(tmp_path: Path) -> None:
    lines = ["55-7f ---p 00000000 00:00 0  [rollup]", "Rss: 100 kB", "Pss:   70 kB", "Anonymous: 60 kB"]
    (tmp_path / "rollup").write_text("\n".join(lines))
    assert current_process_memory(tmp_path / "rollup") == ProcessMemory(70 << 10, 60 << 10, 40 << 10)
    with pytest.raises(KvkeepError, match="can be measured on Linux only"):
        current_process_memory(tmp_path / "nowhere")
