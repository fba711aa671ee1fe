"""The packaged experiments: a TOML file each."""

from __future__ import annotations

from pathlib import Path

from kvkeep.errors import unknown


def packaged() -> list[str]:
    """Return the names of the packaged experiments."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def check_name(name: str) -> None:
    """Raise UsageError for a name that is neither a packaged experiment's nor a path that ends in ``.toml``."""
    if name not in packaged() and Path(name).suffix != ".toml":
        raise unknown("experiment", name, packaged())
