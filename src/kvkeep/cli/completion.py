"""Shell completion of option values."""

from __future__ import annotations

import re

from kvkeep.cli.registry_cache import cached


def methods(incomplete: str) -> list[str]:
    """Return completions of the last method in a list separated by commas: names of methods, or after a ``+`` names of
    fates and recalls."""
    before = re.match(r"(.*[,+])?", incomplete)[0]  # type: ignore[index] # matches everything
    names = cached("completion", _names)["parts" if before.endswith("+") else "methods"]
    return [before + name for name in names if (before + name).startswith(incomplete)]


def _names() -> dict[str, list[str]]:
    from kvkeep.policies.methods import ONESHOT, STOCK, names, parts

    return {"methods": [*names(), STOCK], "parts": [*parts()["fates"], *parts()["recalls"], ONESHOT]}
