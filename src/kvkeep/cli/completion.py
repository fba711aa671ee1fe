"""What a shell completes in the values of options."""

from __future__ import annotations

import re

from kvkeep.cli.registry_cache import cached


def methods(incomplete: str) -> list[str]:
    """Return how a method's name, or the last of several by commas, may go on: with the names of all methods, after a
    ``+`` with those of fates and recalls."""
    before = re.match(r"(.*[,+])?", incomplete)[0]  # type: ignore[index] # matches everything
    listed = _known()["parts" if before.endswith("+") else "methods"]
    return [before + name for name in listed if (before + name).startswith(incomplete)]


def _known() -> dict[str, list[str]]:
    """Return the names of methods, and of what may stand behind a ``+``."""
    return cached("completion", _found)


def _found() -> dict[str, list[str]]:
    from kvkeep.policies.methods import ONESHOT, STOCK, names, parts

    return {"methods": [*names(), STOCK], "parts": [*parts()["fates"], *parts()["recalls"], ONESHOT]}
