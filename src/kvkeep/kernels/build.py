"""Compiles the CPU kernels once a machine and release of torch's OpenMP, and loads them.

The sources need no headers of torch and are called through ctypes: any compiler will do, they fit every version of
torch, and a call costs a few microseconds. They run on the OpenMP runtime that torch has loaded, with as many threads.
``KVKEEP_KERNELS=0`` turns the kernels off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kvkeep.errors import KvkeepError
from kvkeep.models.folders import cache_folder

log = logging.getLogger(__name__)
SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-fPIC", "-w")
COMPILERS = ("c++", "g++", "clang++")
PATIENCE_S = 180


_KINDS = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
SIGNATURES = {
    "kk_product": "pplppl",
    "kk_norm": "ppfllp",
    "kk_enter": "ppllppippppp",
    "kk_leave": "ppplpppp",
    "kk_attend": "ppippi",
    "kk_attend_alone": "pppllllllllfpppi",
    "kk_received": "pplip",
    "kk_replace": "plpp",
    "kk_together": "plpppllifpp",
    "kk_layers": "ppplllppp",
}
"""The kernels' arguments: pointers, integers of 64 bits and of 32, floats."""


def kernels() -> ctypes.CDLL:
    """Return the kernels where it is known that they are there."""
    found = library()
    assert found is not None
    return found


def address(tensor: torch.Tensor | None) -> int | None:
    """Return where a tensor's numbers begin, None for none: a pointer, which does not keep the tensor."""
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None where there is no compiler, the machine is too old for them to pay, or they
    were turned off. The reason is logged."""
    if os.environ.get("KVKEEP_KERNELS") == "0":
        log.info("KVKEEP_KERNELS=0: plain operations of torch are used.")
        return None
    try:
        loaded = ctypes.CDLL(str(_built()))
    except (OSError, RuntimeError, subprocess.SubprocessError, KvkeepError) as error:
        log.warning("The CPU kernels cannot be built, plain operations of torch are used: %s", error)
        return None
    for name, kinds in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = [_KINDS[kind] for kind in kinds], None
    if not loaded.kk_native():  # neither AVX-512 BF16 nor AVX2
        log.info("This processor has no AVX2: plain operations of torch are used.")
        return None
    return loaded


def _built() -> Path:
    """Return the compiled library, compiling it the first time; from then on it needs no compiler."""
    openmp = _openmp()
    stamp = hashlib.sha256(" ".join((*FLAGS, _processor())).encode())
    for path in (*HEADERS, *SOURCES, *openmp):
        stamp.update(path.read_bytes())
    target = cache_folder() / "kernels" / f"cpu-{stamp.hexdigest()[:16]}.so"
    if target.is_file():
        return target
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise RuntimeError(f"no compiler ({', '.join(COMPILERS)}) is on the path.")
    target.parent.mkdir(parents=True, exist_ok=True)
    log.warning("Compiling the CPU kernels for this machine, once: some 20 s ...")  # who waits wants to know for what
    # Objects are linked with torch's own OpenMP by its path: a second runtime would fight for the same cores.
    flags, linked = (FLAGS, ()) if not openmp else ((*FLAGS, "-fopenmp"), (str(openmp[0]),))
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {source: str(Path(folder) / f"{source.stem}.o") for source in SOURCES}
        list(pool.map(lambda one: _run(compiler, *flags, "-c", str(one), "-o", objects[one]), SOURCES))
        made = Path(folder) / "cpu.so"
        _run(compiler, *flags, "-shared", *objects.values(), "-o", str(made), *linked)
        os.replace(made, target)
    return target


def _run(*command: str) -> None:
    """Run a compiler. Raises RuntimeError with the first line of what it says if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE_S)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the compiler failed"])[0][:300])


def _processor() -> str:
    """Return what tells processors apart: a library compiled for one may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return " ".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _openmp() -> list[Path]:
    """Return torch's OpenMP runtime, nothing where there is none that gcc's code can use."""
    found = sorted(Path(torch.__file__).parent.glob("lib/libgomp*")) + sorted(
        Path(torch.__file__).parents[1].glob("torch.libs/libgomp*")
    )
    return found[:1]
