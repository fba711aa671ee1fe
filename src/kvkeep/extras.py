"""Optional packages: imported when used, and named in the error when missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvkeep.errors import UsageError


def optional(module: str, extra: str) -> Any:
    """Return the module called ``module``, which the extra ``extra`` installs (``pip install '.[extra]'``).

    Raises UsageError, with package and extra, if it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] not in (package, *_OF.get(extra, ())):
            raise
        raise UsageError(
            f"This needs the package '{error.name.partition('.')[0]}', which is not installed: {how(extra)}."
        ) from None


def how(extra: str) -> str:
    """Return how to install an extra. kvkeep is on no package index, so a name alone finds nothing."""
    what = "./lab" if extra == "lab" else f"'.[{extra}]'"
    return f"pip install {what} in a clone of kvkeep"


_OF = {
    "cli": ("typer", "rich"),
    "serve": ("fastapi", "uvicorn", "pydantic", "prometheus_client"),
    "lab": ("kvkeep_lab", "matplotlib", "pydantic", "filelock", "rouge_score", "markdown_it"),
}
