"""The native library as Python calls it: how it is found, which path it takes, and what its errors become.

Its kernels are called by the modules that have something to compute, its other functions here and in structures.py. It
lies beside this file, made when the package is built. If
it is missing or cannot be loaded, callers use plain torch operations, and one sentence says so. The environment
variable ``KVKEEP_CPU`` names the path to use (``plain``, ``avx2``, ...), or ``torch`` for no library at all.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import logging
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvkeep.errors import BadCall, KvkeepError, OutOfMemory, UsageError, out_of_memory, ran_out_of_memory
from kvkeep.native.structures import BAD_CALL, FAILED, INTERFACE, NO_MEMORY, KvArray, array, functions
from kvkeep.native.threads import limit_threads

log = logging.getLogger(__name__)

FILE = Path(__file__).with_name("libkvkeep.so")
"""The library; by this name on macOS as well."""
SLOWDOWN = "about ten times slower"
"""The speed of plain torch operations, compared with the library."""
OPENMP = ("libgomp", "libomp", "libiomp")
"""The first parts of the file names of OpenMP runtimes."""
TORCH = "torch"
"""The value of ``KVKEEP_CPU`` that means no library."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the native library; None where there is none, or ``KVKEEP_CPU=torch``. Raises UsageError where
    ``KVKEEP_CPU`` names a path that this processor does not run."""
    loaded = _chosen()
    if loaded is not None:
        _share_threads(loaded)
    return loaded


def kernels() -> ctypes.CDLL:
    """Return the native library where the caller knows that it is there."""
    found = library()
    assert found is not None
    return found


def path() -> str:
    """Return the name of the path in use: ``plain``, ``avx2``, ..., or ``torch`` without the library. Does not load
    torch."""
    found = _chosen()
    return TORCH if found is None else found.kvkeep_path().decode()


def check_environment() -> None:
    """Raise UsageError where ``KVKEEP_CPU`` names no path of this machine. Needs neither torch nor much time."""
    if os.environ.get("KVKEEP_CPU"):
        _chosen()


def _chosen() -> ctypes.CDLL | None:
    """Return the library on the path that ``KVKEEP_CPU`` names, the best one without it; without threads."""
    wanted = os.environ.get("KVKEEP_CPU", "")
    if wanted == TORCH:
        return None
    loaded = _loaded()
    if loaded is None:
        if wanted:
            raise UsageError(f"KVKEEP_CPU={wanted} needs the native library, which {_absent()}.")
        return None
    paths = loaded.kvkeep_paths().decode().split()
    if wanted and wanted not in paths:
        raise UsageError(
            f"KVKEEP_CPU={wanted}: this machine cannot run '{wanted}'. It runs {', '.join([*paths, TORCH])}."
        )
    loaded.kvkeep_choose((wanted or paths[0]).encode())
    return loaded


def _absent() -> str:
    return "cannot be used" if FILE.is_file() else "was not built"


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    """Load the library and check that it was compiled with this kvkeep.h; None if it cannot be used, which a warning
    says."""
    try:
        _check_digest()
        loaded = ctypes.CDLL(str(FILE))
        interface = getattr(loaded, "kvkeep_interface", None)
        if interface is not None:
            interface.restype = ctypes.c_char_p
        if interface is None or interface().decode() != INTERFACE:  # it computes other bits, or reads other memory
            raise KvkeepError("it was built for another kvkeep; install kvkeep again")
        for name, (result, arguments) in functions().items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, ctypes.c_int if result == "KvStatus" else result
            if result == "KvStatus":
                function.errcheck = _check_status
            if KvArray in arguments:
                setattr(loaded, name, _taking_tensors(function, arguments))
    except (OSError, AttributeError, KvkeepError) as error:
        if ran_out_of_memory(error):  # without the library, bits would be others
            raise out_of_memory("the native library", error) from error
        if FILE.is_file():
            log.warning("The native library cannot be used (%s). kvkeep computes with torch, %s.", error, SLOWDOWN)
        else:
            log.warning("The native library was not built. kvkeep computes with torch, %s.", SLOWDOWN)
        return None
    return loaded


def _taking_tensors(function: Any, types: list[Any]) -> Callable[..., Any]:
    """Return the function with a tensor or None for each KvArray. They are described before ctypes is called, which
    would make an ArgumentError of a BadCall or a KeyboardInterrupt."""

    places = [place for place, kind in enumerate(types) if kind is KvArray]

    def call(*given: Any) -> Any:
        arguments = [*given]
        for place in places:
            if not isinstance(one := arguments[place], KvArray):
                arguments[place] = array(one)
        return function(*arguments)

    return call


def _check_status(status: int, function: Any, arguments: Any) -> int:
    """Raise OutOfMemory or BadCall where a kernel did not begin, and has written nothing; KvkeepError where it did not
    end."""
    if status == NO_MEMORY:
        raise OutOfMemory("There was no memory for the native library to work in; use a smaller budget, text or model.")
    if status == BAD_CALL:
        raise BadCall(kernels().kvkeep_broken_rule().decode())
    if status == FAILED:
        raise KvkeepError(f"The native library has an error: {function.__name__} has not ended. Please report it.")
    return status


def _check_digest() -> None:
    """Raise KvkeepError where the library's file is not what was built: the system ends a program that reads beyond the
    end of a file cut short. Where no digest lies beside it, there is nothing to compare."""
    digest = FILE.with_suffix(".sha256")
    if digest.is_file() and digest.read_bytes().strip() != hashlib.sha256(FILE.read_bytes()).hexdigest().encode():
        raise KvkeepError("its file is damaged or another build's; install kvkeep again")


def map_file(descriptor: int, size: int) -> Any | None:
    """Return the first ``size`` bytes of an open file as a writable buffer, which is mapped until its last reference
    goes; None without the library. Where the disk refuses a read later, the buffer is zeros (:func:`is_lost`). Raises
    OSError where the system maps no more files."""
    loaded = library()
    if loaded is None:
        return None
    start = loaded.kvkeep_map_file(descriptor, size)
    if not start:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    buffer = (ctypes.c_ubyte * size).from_address(start)
    weakref.finalize(buffer, loaded.kvkeep_unmap_file, start).atexit = False
    return buffer


def lost_files() -> int:
    """Return how many mapped files could not be read so far."""
    loaded = library()
    return 0 if loaded is None else int(loaded.kvkeep_lost_files())


def is_lost(address: int) -> bool:
    """Return whether the mapped file that has ``address`` could not be read."""
    return bool(kernels().kvkeep_is_lost(address))


def _share_threads(loaded: ctypes.CDLL) -> None:
    """Let the library use torch's OpenMP threads, or else the same number of other threads: two OpenMP runtimes would
    compete for the same cores."""
    import torch

    limit_threads()
    loaded.kvkeep_set_threads(torch.get_num_threads())
    runtime = _openmp(Path(torch.__file__).parent)
    if runtime is not None:
        parallel, count = (_function_address(runtime, name) for name in ("GOMP_parallel", "omp_get_max_threads"))
        if count is not None:
            loaded.kvkeep_use_openmp(parallel, count)


def _openmp(torch_folder: Path) -> ctypes.CDLL | None:
    """Return the OpenMP runtime that torch has loaded; None where that is unknown."""
    folders = (torch_folder / "lib", torch_folder.parent / "torch.libs")
    found = [file for folder in folders for name in OPENMP for file in sorted(folder.glob(f"{name}*"))]
    for file in [*found, *_mapped_openmp()]:
        try:
            return ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:  # the file exists, but torch did not load it
            continue
    return None


def _mapped_openmp() -> list[Path]:
    """Return the OpenMP runtimes that this process has mapped: a torch of the distribution uses the system's."""
    if sys.platform != "linux":
        return []
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {Path(parts[5]) for line in lines if len(parts := line.split(maxsplit=5)) == 6}
    return sorted(file for file in files if file.name.startswith(OPENMP))


def _function_address(runtime: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value
    except AttributeError:
        return None


# ---- the C library -------------------------------------------------------------------------------


@functools.cache
def _malloc_trim() -> Any:
    """Return glibc's malloc_trim; None where the C library has none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def trim_memory() -> None:
    """Return freed memory to the system, where the C library can. Packing a model frees memory between tensors in use,
    whose pages the process would keep (1.6 GB for a model of 8 billion parameters)."""
    if (trim := _malloc_trim()) is not None:
        trim(0)
