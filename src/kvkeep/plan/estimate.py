"""Rates of this machine before anything is measured: from what it says of itself, and a table. Nothing is run."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from kvkeep.native.library import library
from kvkeep.plan.machine import ESTIMATED, Machine

DTYPE = torch.bfloat16
"""What models of GGUF files and packed weights compute in; ``kvkeep calibrate`` measures it unless told otherwise."""


@dataclass(frozen=True)
class CoreRates:
    """What one core does in a second, with room below what most machines reach."""

    operations: float
    """Floating-point operations of products with many rows."""
    memory: float
    """Bytes read, as long as other cores leave some."""


CORES = {
    "avx512": CoreRates(5e10, 6e9),
    "avxvnni": CoreRates(3e10, 6e9),
    "avx2": CoreRates(2e10, 5e9),
    "neon": CoreRates(1e10, 4e9),
    "plain": CoreRates(2e9, 3e9),
}
"""By instruction set, named as the native library's paths."""

MAX_MEMORY = 2e10
"""Bytes a second of all cores together: two channels of memory."""
TWIN = 0.1
"""Share of the operations in half precision that torch reaches where the native library is missing."""
DISK = 5e8
LAYER_STEP_S = {True: 3e-4, False: 1e-3}
"""Seconds that a layer takes beside its parts, with the native library and without."""
ACCELERATOR = {"flops": 1e13, "memory": 2e11, "link": 8e9, "layer_step": 3e-4}
"""Of any other device: what a small one of the last years has."""

_FLAGS = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx2", "fma", "f16c"},
    "avxvnni": {"avx_vnni", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
}
"""Flags of /proc/cpuinfo that an instruction set takes, the best one first."""


def processor(cpuinfo: str | os.PathLike[str] = "/proc/cpuinfo") -> str:
    """Return the instruction set of this processor, a key of :data:`CORES`: the one that ``KVKEEP_CPU`` names, or the
    best that the system tells of; ``plain`` where it tells nothing."""
    wanted = os.environ.get("KVKEEP_CPU", "")
    if wanted in CORES:
        return wanted
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "neon"
    with suppress(OSError):
        for line in Path(cpuinfo).read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.partition(":")[2].split())
                return next((name for name, needed in _FLAGS.items() if needed <= flags), "plain")
    return "plain"


def estimated(device: str = "cpu", dtype: torch.dtype = DTYPE) -> Machine:
    """Return what this machine's rates are likely to reach at least, for models on ``device`` in ``dtype``."""
    kind, native = device.partition(":")[0], library() is not None
    instructions, threads = processor(), torch.get_num_threads()
    core = CORES[instructions]
    share = 1.0 if native or dtype == torch.float32 else TWIN
    rates = (
        {
            "flops": share * threads * core.operations,
            "memory": min(MAX_MEMORY, threads * core.memory),
            "link": None,
            "layer_step": LAYER_STEP_S[native],
        }
        if kind == "cpu"
        else ACCELERATOR
    )
    return Machine.from_sheet(
        name=described(device, dtype) + (f", {instructions}" if kind == "cpu" else ""),
        device=kind,
        disk=DISK,
        memory_bytes=device_bytes(device),
        host_bytes=host_bytes(),
        dtype_bytes=dtype.itemsize,
        reached=1.0,
        source=f"{ESTIMATED}; run `{_command(kind, dtype)}` to measure",
        **rates,
    )


def _command(kind: str, dtype: torch.dtype) -> str:
    """Return the command that measures what was estimated."""
    options = ("" if kind == "cpu" else f" --device {kind}") + ("" if dtype == DTYPE else f" --dtype {named(dtype)}")
    return f"kvkeep calibrate{options}"


def named(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its package."""
    return str(dtype).removeprefix("torch.")


def described(device: str, dtype: torch.dtype) -> str:
    """Return hardware, threads and dtype, as a person reads them."""
    return f"{processor_name(device)}, {torch.get_num_threads()} threads, {named(dtype)}"


def processor_name(device: str) -> str:
    """Return the model of a device, or of the processor."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device_bytes(device: str) -> int:
    """Return the bytes of memory of a device."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_bytes()


def host_bytes() -> int:
    """Return the bytes of memory of this machine."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 8 * 10**9


def busy() -> bool:
    """Return whether other programs take more than half of the processor: what is measured then is too slow."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load > (os.cpu_count() or 1) / 2
