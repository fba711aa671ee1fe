"""What a shell completes in the values of options."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import kvkeep
from kvkeep.models.folders import cache_folder
from kvkeep.plugins import PARTS, points


def methods(incomplete: str) -> list[str]:
    """Return how a method's name, or the last of several by commas, may go on: with the names of all methods, after a
    ``+`` with those of fates and recalls."""
    before = re.match(r"(.*[,+])?", incomplete)[0]  # type: ignore[index] # matches everything
    listed = _known()["parts" if before.endswith("+") else "methods"]
    return [before + name for name in listed if (before + name).startswith(incomplete)]


def _known() -> dict[str, list[str]]:
    """Return the names of methods, and of what may stand behind a ``+``. They are kept in the cache folder, by what is
    installed: to find them anew takes seconds, since parts import torch."""
    registry = Path(kvkeep.__file__).parent / "policies" / "registry.py"
    plugged = sorted(f"{point.name} {point.value}" for point in points(PARTS))
    of = [kvkeep.__version__, registry.stat().st_mtime_ns, *plugged]
    path = cache_folder() / "completion.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["of"] == of:
            return {"methods": list(kept["methods"]), "parts": list(kept["parts"])}
    from kvkeep.policies.methods import ONESHOT, STOCK, names, parts

    found = {"methods": [*names(), STOCK], "parts": [*parts()["fates"], *parts()["recalls"], ONESHOT]}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"of": of, **found}), encoding="utf-8")
    return found
