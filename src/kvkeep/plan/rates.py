"""The rates that plans are made with: measured ones where this machine has been measured, else estimates.

Measured rates are files in the user's cache folder, one for each hardware, number of threads, dtype, and version of
torch, with the native library and without. :mod:`kvkeep.plan.calibrate` measures; this module does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from kvkeep.errors import KvkeepError, UsageError
from kvkeep.models.folders import cache_folder
from kvkeep.native.library import path as native_path
from kvkeep.plan.estimate import DTYPE, estimated, named, processor_name
from kvkeep.plan.machine import Machine

VERSION = 6
"""Raised whenever what is measured changes, so that older measurements are not used."""


class BusyError(KvkeepError):
    """Another process measures this machine."""


def machine_here(device: str = "cpu", dtype: torch.dtype = DTYPE) -> Machine:
    """Return this machine's rates, measured or estimated (``Machine.source`` says which), without measuring."""
    return measured(device, dtype) or estimated(_indexed(device), dtype)


def measured(device: str, dtype: torch.dtype) -> Machine | None:
    """Return the rates that were measured here; None where there is no file that can be read."""
    with suppress(UsageError):
        return Machine.load(rates_file(device, dtype))
    return None


def rates_file(device: str, dtype: torch.dtype) -> Path:
    """Return the file of measured rates. Raises UsageError where the user has no cache folder."""
    device = _indexed(device)
    facts = [VERSION, platform.node(), processor_name(device), os.cpu_count(), torch.get_num_threads()]
    facts += [torch.__version__, device, named(dtype), native_path() if device == "cpu" else ""]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_folder() / "machines" / f"{device.replace(':', '-')}-{key}.json"


def failure_file(device: str, dtype: torch.dtype) -> Path:
    """Return the file that says why a measurement in the background failed, so that no process tries it again."""
    return rates_file(device, dtype).with_suffix(".failed")


def store(machine: Machine, path: Path) -> None:
    """Write measured rates, completely or not at all."""
    part = path.with_suffix(f".{os.getpid()}")
    machine.save(part)
    part.replace(path)
    path.with_suffix(".failed").unlink(missing_ok=True)


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Within the block no other process measures. Raises BusyError while one does, KvkeepError for a folder that cannot
    be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "measuring").open("w")
    except OSError as error:
        raise KvkeepError(f"Rates cannot be kept in '{folder}': {(error.strerror or str(error)).lower()}.") from None
    with file:
        try:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows: two at a time disturb each other
            pass
        except OSError:
            raise BusyError("Another process is measuring this machine; wait for it to end.") from None
        yield


def _indexed(device: str) -> str:
    """Return a device as torch names it: "cuda" is "cuda:0"."""
    return str(torch.empty(0, device=device).device)
