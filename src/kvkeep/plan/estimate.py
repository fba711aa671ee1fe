"""Rates of this machine before anything is measured: from what it says of itself, and a table. Nothing is run."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from kvkeep.native.library import TORCH, path
from kvkeep.plan.machine import ESTIMATED, Machine

DTYPE = torch.bfloat16
"""What models of GGUF files and packed weights compute in; ``kvkeep calibrate`` measures it by default."""


@dataclass(frozen=True)
class CoreRates:
    """What one core does in a second, well below what most machines reach."""

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
    TORCH: CoreRates(1e10, 4e9),
}
"""By the path of the native library; ``torch`` without it."""

MAX_MEMORY = 2e10
"""Bytes a second of all cores together: two channels of memory."""
HALF_PRECISION = 0.1
"""Share of the operations that torch reaches in half precision without the native library."""
DISK = 5e8
LAYER_STEP_S, TORCH_LAYER_STEP_S = 3e-4, 1e-3
"""Seconds that a layer takes beside its parts, with the native library and without."""
ACCELERATOR = {"flops": 1e13, "memory": 2e11, "link": 8e9, "layer_step": 3e-4}
"""Of any other device: what a small one of the last years has."""


def estimated(device: str = "cpu", dtype: torch.dtype = DTYPE) -> Machine:
    """Return what this machine's rates are likely to reach at least, for models on ``device`` in ``dtype``."""
    kind, name = device.partition(":")[0], described(device, dtype)
    rates: dict[str, float | None] = {**ACCELERATOR}
    if kind == "cpu":
        native, threads = path(), torch.get_num_threads()
        core, share = CORES[native], HALF_PRECISION if native == TORCH and dtype != torch.float32 else 1.0
        rates = {"flops": share * threads * core.operations, "memory": min(MAX_MEMORY, threads * core.memory)}
        rates |= {"link": None, "layer_step": TORCH_LAYER_STEP_S if native == TORCH else LAYER_STEP_S}
        name += f", {native}"
    options = ("" if kind == "cpu" else f" --device {kind}") + ("" if dtype == DTYPE else f" --dtype {named(dtype)}")
    return Machine.from_sheet(
        name=name,
        device=kind,
        disk=DISK,
        memory_bytes=device_bytes(device),
        host_bytes=host_bytes(),
        dtype_bytes=dtype.itemsize,
        reached=1.0,
        source=f"{ESTIMATED}; run `kvkeep calibrate{options}` to measure",
        **rates,  # type: ignore[arg-type]
    )


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
    """Return whether other programs take more than half of the processor: a measurement is then too slow."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load > (os.cpu_count() or 1) / 2
