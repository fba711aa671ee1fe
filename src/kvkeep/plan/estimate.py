"""Estimates the rates of this machine from its description and a table, without a measurement."""

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
"""Dtype of computation for GGUF files and packed weights; ``kvkeep calibrate`` measures it by default."""


@dataclass(frozen=True)
class CoreRates:
    """Rates of one core, well below those of most machines."""

    operations: float
    """Floating-point operations a second of products with many rows."""
    memory: float
    """Bytes read a second, if other cores do not use up the bandwidth."""


CORES = {
    "avx512": CoreRates(5e10, 6e9),
    "avxvnni": CoreRates(3e10, 6e9),
    "avx2": CoreRates(2e10, 5e9),
    "neon": CoreRates(1e10, 4e9),
    "plain": CoreRates(2e9, 3e9),
    TORCH: CoreRates(1e10, 4e9),
}
"""Rates by the instruction set that the native library uses; ``torch`` without the library."""

MAX_MEMORY = 2e10
"""Bytes read a second by all cores: two channels of memory."""
HALF_PRECISION = 0.1
"""Share of the operations a second that torch reaches in half precision without the native library."""
DISK = 5e8
LAYER_STEP_S, TORCH_LAYER_STEP_S = 3e-4, 1e-3
"""Fixed seconds of a layer, with the native library and without."""
ACCELERATOR = {"flops": 1e13, "memory": 2e11, "link": 8e9, "layer_step": 3e-4}
"""Rates of any other device: those of a small recent one."""


def estimated(device: str = "cpu", dtype: torch.dtype = DTYPE) -> Machine:
    """Return rates that this machine probably reaches or exceeds, for models on ``device`` in ``dtype``."""
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
    """Return hardware, threads and dtype as text for people."""
    return f"{processor_name(device)}, {torch.get_num_threads()} threads, {named(dtype)}"


def processor_name(device: str) -> str:
    """Return the product name of a device, or of the processor."""
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
    """Return whether other programs use more than half of the processor, which makes measured rates too low."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load > (os.cpu_count() or 1) / 2
