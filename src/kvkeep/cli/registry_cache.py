"""Tables of the registry, saved in the cache folder. Building them takes seconds, because parts import torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import kvkeep
from kvkeep.files import write_whole
from kvkeep.models.folders import cache_folder
from kvkeep.plugins import PARTS, points
from kvkeep.private_files import make_folder


def cached(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the plain data of ``make``, from a file if possible. ``make`` is called again after a change of version,
    method files or plugins."""
    package = Path(kvkeep.__file__).parent
    newest = max(path.stat().st_mtime_ns for path in package.glob("policies/**/*.py"))
    made_for = [kvkeep.__version__, newest, *sorted(f"{point.name} {point.value}" for point in points(PARTS))]
    path = cache_folder() / f"{name}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved.pop("made_for") == made_for:
            return dict(saved)
    made = make()
    with suppress(OSError):
        make_folder(path.parent)
        content = json.dumps({"made_for": made_for, **made}).encode()
        write_whole(path, lambda file: file.write(content), private=True)
    return made
