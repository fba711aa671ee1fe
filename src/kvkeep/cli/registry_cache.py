"""Tables of the registry, remembered in the cache folder: to make them anew takes seconds, since parts import torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import kvkeep
from kvkeep.models.folders import cache_folder
from kvkeep.plugins import PARTS, points


def cached(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``make`` returns, plain data; made again only where another version, other files of methods or other
    plugins are installed."""
    package = Path(kvkeep.__file__).parent
    newest = max(path.stat().st_mtime_ns for path in package.glob("policies/**/*.py"))
    of = [kvkeep.__version__, newest, *sorted(f"{point.name} {point.value}" for point in points(PARTS))]
    path = cache_folder() / f"{name}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept.pop("of") == of:
            found: dict[str, Any] = kept
            return found
    made = make()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"of": of, **made}), encoding="utf-8")
    return made
