"""Rows of data sets, from JSON files in the data folder or from the Hugging Face hub."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from kvkeep.decode.texts import read_text
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.models.folders import cache_folder, scratch

T = TypeVar("T")


@dataclass(frozen=True)
class Hub:
    """A data set of the hub."""

    repository: str
    part: str | None = None
    """Its configuration, if it has any."""
    split: str = "test"
    rows: int | None = None
    """Number of first rows to use; None for all."""

    @property
    def file(self) -> str:
        """Name of the local file of its rows."""
        named = (self.repository, self.part, self.split, None if self.rows is None else f"first{self.rows}")
        return "-".join(part for part in named if part).replace("/", "-") + ".jsonl"


def source(data: Path | None, file: str, hub: Hub | None = None) -> Path:
    """Return the path of a data set's file: ``data`` itself if it is a file, or ``file`` in that folder. Without
    ``data``, the rows are downloaded from the hub to kvkeep's cache folder, once.

    Raises UsageError, with advice, if the file or the package ``datasets`` is missing, and KvkeepError if the hub does
    not answer.
    """
    if data is not None:
        path = data if data.is_file() else data / file
        if not path.is_file():
            raise UsageError(f"There is no file '{path}'; give the folder that holds {file} (--data).")
        return path
    if hub is None:
        raise UsageError(f"This task reads {file}: give the folder that holds it (--data FOLDER).")
    path = cache_folder() / "data" / hub.file
    return path if path.is_file() else _fetched(hub, path, file)


def _fetched(hub: Hub, path: Path, file: str) -> Path:
    if find_spec("datasets") is None:
        raise UsageError(
            f"This task reads {file}: give the folder that holds it (--data FOLDER), or install the package 'datasets' "
            f"(pip install datasets), and '{hub.repository}' is fetched from the hub."
        )
    with scratch(path.parent) as folder:
        try:
            found = import_module("datasets").load_dataset(hub.repository, hub.part, split=hub.split, streaming=True)
            with (folder / path.name).open("w", encoding="utf-8") as lines:
                lines.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in islice(found, hub.rows))
        except Exception as error:  # from many libraries: hub, network, file formats
            reason = str(error).strip().splitlines() or [repr(error)]
            raise KvkeepError(
                f"The data set '{hub.repository}' could not be fetched from the hub ({reason[0]}); "
                f"check the network, or give the folder that holds {file} (--data FOLDER)."
            ) from error
        os.replace(folder / path.name, path)
    return path


def rows(path: Path, *wanted: str) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines or of one JSON list. A file with a single JSON object has one row.

    Raises UsageError with the line (or the place in the list) of a row that is no object or lacks a field of
    ``wanted``.
    """
    text = read_text(str(path))
    try:
        parsed = json.loads(text)
    except ValueError:
        found, place = [_parsed(line) for line in text.split("\n") if line.strip()], "Line"
    else:
        found, place = (parsed, "Entry") if isinstance(parsed, list) else ([parsed], "Entry")
    for number, row in enumerate(found, start=1):
        if not isinstance(row, dict):
            raise UsageError(f"{place} {number} of '{path}' is not a JSON object.")
        if missing := [field for field in wanted if field not in row]:
            raise UsageError(
                f"{place} {number} of '{path}' has no field '{missing[0]}'; wanted are {', '.join(wanted)}."
            )
    return found


def drawn(found: Sequence[T], count: int, seed: int, what: str) -> list[T]:
    """Return ``count`` items of ``found``: the first ones for seed 0, else a random draw. Raises UsageError if there
    are fewer; ``what`` names the items and their place."""
    if len(found) < count:
        raise UsageError(f"{what}, and {count} are wanted.")
    return list(found[:count]) if seed == 0 else random.Random(seed).sample(found, count)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
