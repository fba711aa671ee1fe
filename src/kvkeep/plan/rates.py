"""The rates for plans: measured rates if this machine was measured, else estimates.

Measured rates are files in the user's cache folder: one for each combination of hardware, number of threads, dtype,
version of torch, and presence of the native library. :mod:`kvkeep.plan.calibrate` writes them.
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

from kvkeep.errors import KvkeepError, UsageError, reason_of
from kvkeep.files import write_whole
from kvkeep.models.folders import cache_folder
from kvkeep.native.library import path as native_path
from kvkeep.plan.estimate import DTYPE, estimated, named, processor_name
from kvkeep.plan.machine import Machine
from kvkeep.private_files import make_folder, open_lock

VERSION = 6
"""Version of the measurements. Older measurements are ignored."""


class BusyError(KvkeepError):
    """Another process is measuring this machine."""


def machine_here(device: str = "cpu", dtype: torch.dtype = DTYPE) -> Machine:
    """Return this machine's rates, measured or estimated (``Machine.source`` says which), without measuring."""
    return measured(device, dtype) or estimated(_indexed(device), dtype)


def measured(device: str, dtype: torch.dtype) -> Machine | None:
    """Return the measured rates of this machine; None if there is no readable file."""
    with suppress(UsageError):
        return Machine.load(rates_file(device, dtype))
    return None


def rates_file(device: str, dtype: torch.dtype) -> Path:
    """Return the path of the measured rates. Raises UsageError if the user has no cache folder."""
    device = _indexed(device)
    facts = [VERSION, platform.node(), processor_name(device), os.cpu_count(), torch.get_num_threads()]
    facts += [torch.__version__, device, named(dtype), native_path() if device == "cpu" else ""]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_folder() / "machines" / f"{device.replace(':', '-')}-{key}.json"


def failure_file(device: str, dtype: torch.dtype) -> Path:
    """Return the path of the error of a failed background measurement. While the file exists, no process retries."""
    return rates_file(device, dtype).with_suffix(".failed")


def store(machine: Machine, path: Path) -> None:
    """Write measured rates atomically."""
    write_whole(path, lambda file: file.write(machine.json().encode()), private=True)
    path.with_suffix(".failed").unlink(missing_ok=True)


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Lock out other measuring processes within the block. Raises BusyError while another process measures, and
    KvkeepError if the folder is not writable."""
    try:
        make_folder(folder)
        file = os.fdopen(open_lock(folder / "measuring"), "r+b")
    except OSError as error:
        raise KvkeepError(f"Rates cannot be kept in '{folder}': {reason_of(error)}.") from None
    with file:
        try:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows: concurrent measurements disturb each other
            pass
        except OSError:
            raise BusyError("Another process is measuring this machine; wait for it to end.") from None
        yield


def _indexed(device: str) -> str:
    """Return torch's full name of a device: "cuda:0" for "cuda"."""
    return str(torch.empty(0, device=device).device)
