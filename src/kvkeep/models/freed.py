"""Memory that was freed, given back to the system."""

from __future__ import annotations

from kvkeep.native.library import trim_memory


def give_back() -> None:
    """Return freed memory to the system: what is packed lies between steps that are freed, and would keep their pages
    (1.6 GB for a model of 8 billion)."""
    trim_memory()
