"""What an option lists, by commas or repeated."""

from __future__ import annotations

from kvkeep.errors import UsageError


def listed(texts: list[str], option: str) -> list[str]:
    """Return what is listed in ``texts``, in order; "none" is an empty list. Raises UsageError for nothing.

    Commas separate, except that ``key=value`` after a comma is one more parameter of the method before it:
    ``h2o:recent=0.5,halflife=64,window`` is two methods.
    """
    found: list[str] = []
    for part in (part.strip() for text in texts for part in text.split(",") if part.strip()):
        named, equals, _ = part.partition("=")
        if found and equals and not set(named) & set(":+"):
            found[-1] += f",{part}"
        else:
            found.append(part)
    if not found:
        raise UsageError(f"{option} lists nothing; name something, separated by commas.")
    return [] if found == ["none"] else found
