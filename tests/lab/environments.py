"""Made-up environments of other interpreters: packages in a folder, and a program that runs workers with them."""

from __future__ import annotations

import stat
import sys
from pathlib import Path


def interpreter(folder: Path, *lines: str) -> str:
    """Return an executable in place of another environment's Python."""
    path = folder / "python"
    path.write_text("\n".join((f"#!{sys.executable}", *lines)))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def with_packages(folder: Path, **sources: str) -> str:
    """Return an interpreter that has these modules and no kvkeep."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    return interpreter(
        folder,
        "import runpy, sys",
        "assert sys.argv[1] == '-I'",
        f"sys.path.insert(0, {str(folder)!r})",
        "sys.modules |= dict.fromkeys(('kvkeep', 'kvkeep_lab'))  # not to be found",
        "runpy.run_path(sys.argv[2], run_name='__main__')",
    )
