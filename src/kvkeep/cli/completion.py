"""What a shell completes in the values of options."""

from __future__ import annotations

import re


def methods(incomplete: str) -> list[str]:
    """Return how a method's name, or the last of several by commas, may go on: with the names of all methods, after a
    ``+`` with those of fates and recalls."""
    from kvkeep.policies.methods import ONESHOT, STOCK, names, parts

    before = re.match(r"(.*[,+])?", incomplete)[0]  # type: ignore[index] # matches everything
    if before.endswith("+"):
        known = parts()
        listed = [*known["fates"], *known["recalls"], ONESHOT]
    else:
        listed = [*names(), STOCK]
    return [before + name for name in listed if (before + name).startswith(incomplete)]
