"""The page of ``kvkeep inspect``: one self-contained HTML file."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from kvkeep import __version__
from kvkeep.errors import StoreError, UsageError, reason_of
from kvkeep_lab.inspection import STATES, Inspection


def render(inspection: Inspection) -> str:
    """Return the page. It contains the trace as JSON (see :meth:`Trace.as_dict`) and a script that replays it."""
    generation = inspection.generation
    data = {
        "version": __version__,
        "model": inspection.model,
        "method": generation.method,
        "class": generation.exactness,
        "budget": inspection.budget,
        "entries": inspection.entries,
        "memory": generation.memory.as_dict(),
        "prompt": generation.prompt_tokens,
        "stopped": generation.stopped,
        "codes": STATES,
        "texts": inspection.texts,
        "trace": inspection.trace.as_dict(),
    }
    values = {
        "TITLE": html.escape(f"What {generation.method} forgets: {inspection.model}"),
        "METHOD": html.escape(generation.method),
        "MODEL": html.escape(inspection.model),
        "DATA": _script_safe(json.dumps(data, ensure_ascii=False, separators=(",", ":"))),
    }
    return filled("kvkeep_lab", "inspection.html", values)


def filled(package: str, name: str, values: Mapping[str, str]) -> str:
    """Return a template of a package with ``values`` in place of their names."""
    template = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    # One pass, so that placeholders within a value are not replaced.
    return re.sub(r"@@([A-Z]+)@@", lambda place: values[place[1]], template)


def _script_safe(text: str) -> str:
    """Return JSON that can neither end nor open a script element. Lone surrogates become escapes, because UTF-8 cannot
    encode them."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return re.sub("[\ud800-\udfff\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


def check_output(path: str | os.PathLike[str], example: str = "cache.html") -> Path:
    """Return the resolved target of ``path``. Raises UsageError if it is not writable; ``example``: a valid name for
    the message."""
    name = os.fspath(path)
    target = Path(os.path.realpath(name))
    if target.is_dir():
        raise UsageError(f"The output '{name}' is a folder; name a file in it, such as '{Path(name) / example}'.")
    if target.exists() and not target.is_file():
        raise UsageError(f"The output '{name}' is not a regular file; name a file, such as '{example}'.")
    if not target.parent.is_dir():
        raise UsageError(f"The output '{name}' cannot be written: there is no folder '{target.parent}'; make it first.")
    if target.exists() and not os.access(target, os.W_OK):
        raise UsageError(f"The output '{name}' is there already and is write-protected; name another file.")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UsageError(f"The output '{name}' cannot be written: the folder '{target.parent}' is write-protected.")
    return target


def write_page(target: Path, page: str) -> None:
    """Write a page atomically. Raises StoreError with the reason if the write fails."""
    part = target.with_name(f".{target.name[:100]}.{os.getpid()}.part")
    try:
        try:
            part.write_text(page, encoding="utf-8")
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"The output '{target}' could not be written: {reason_of(error)}; name another place."
        ) from error
