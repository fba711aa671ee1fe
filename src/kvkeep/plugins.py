"""Other packages: optional ones, and those that add parts and commands.

An optional package is imported when it is used, and named in the error when it is missing. Parts and commands are found
by entry points. A broken one is left out with a warning that names its package; the others work.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from kvkeep.errors import KvkeepError, UsageError

PARTS = "kvkeep.parts"
"""The group of entry points that name selectors, fates, recalls and presets, or a tuple of a fate and its preset."""

log = logging.getLogger(__name__)


class PartlyLeftOut(UsageError):
    """Some parts of an entry point cannot be used: ``names``, for ``reason``. The others are used."""

    def __init__(self, names: Sequence[str], reason: str) -> None:
        super().__init__(reason)
        self.names = names


def points(group: str) -> Iterable[EntryPoint]:
    """Return the entry points of ``group`` of all installed packages."""
    return entry_points(group=group)


def each_plugin(group: str, use: Callable[[str, Any], None]) -> None:
    """Call ``use`` with name and object of every entry point of ``group``. Where an object cannot be imported, or
    ``use`` raises, a warning says so in a sentence for each package and reason: on standard error, unless a program has
    set up logging."""
    failed: dict[tuple[str, str], list[str]] = {}
    for point in points(group):
        try:
            use(point.name, point.load())
        except (Exception, SystemExit) as error:  # a broken package does not affect the others
            package = "no package" if point.dist is None else f"the package '{point.dist.name}'"
            names = error.names if isinstance(error, PartlyLeftOut) else [point.name]
            left_out = failed.setdefault((package, first_line(error)), [])
            left_out += [f"'{name}' ({point.value})" for name in names]
    for (package, reason), out in failed.items():
        log.warning("%s of %s %s left out: %s", ", ".join(out), package, "is" if len(out) == 1 else "are", reason)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with its kind unless it is written for people. For an empty message,
    such as that of a bare ``assert``, return the place."""
    lines = str(error).strip().splitlines()
    kind = type(error).__name__
    if not lines:
        places = traceback.extract_tb(error.__traceback__)
        return f"{kind} in {places[-1].name}, {Path(places[-1].filename).name}:{places[-1].lineno}" if places else kind
    return lines[0] if isinstance(error, KvkeepError) else f"{kind}: {lines[0]}"


def optional(module: str, extra: str) -> Any:
    """Return the module called ``module``, which the extra ``extra`` installs (``pip install '.[extra]'``).

    Raises UsageError, with package and extra, if it is not installed.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise UsageError(f"This needs the package '{package}', which is not installed: {how(extra)}.") from None


def how(extra: str) -> str:
    """Return how to install an extra. kvkeep is on no package index, so a name alone finds nothing."""
    what = "./lab" if extra == "lab" else f"'.[{extra}]'"
    return f"pip install {what} in a clone of kvkeep"
