"""The kernels are compiled for GPUs, without one: for compute capability 8.0 and 9.0, by triton, and then by its
assembler. It says what a program needs of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
SMALLEST = 99 * 1024
"""Bytes of shared memory that a program may have where there is the least: compute capability 8.6 and 8.9."""
STEP, CHUNK = "attend_block", "attend_chunk"
COMPILED = """
import json, re, subprocess, sys, tempfile
import triton
from kvkeep.step.triton import calls, kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

dtype, dim, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
types = {"tasks": "*i64", "table": "*i64", "writes": "*i64", "scaling": "fp32"}
types |= dict.fromkeys(("anchor", "query", "output", "key", "value"), "*" + dtype)
types |= dict.fromkeys(("parts", "sums", "lse", "state", "sinks"), "*fp32")
unit = 4 if dtype == "fp32" else 8
shape = {"K": dim, "V": dim, "DIM": dim, "VALUE_DIM": dim, "ALIGN": unit, "VALUE_ALIGN": unit, "SINKS": True}
shape["CAP"] = 50.0 if dim == 256 else 0.0  # as in Gemma 2
rows = calls.FEW_ROWS if dtype == "fp32" else calls.MANY_ROWS
for kernel, rows, options in (
    (kernels.attend_block, calls.FEW_ROWS, calls.ATTENDS), (kernels.combine, calls.FEW_ROWS, calls.COPIES),
    (kernels.attend_chunk, rows, calls.ATTENDS), (kernels.write_entries, 0, calls.COPIES),
):
    names = kernel.arg_names
    signature = {name: "constexpr" if name.isupper() else types.get(name, "i32") for name in names}
    constants = {(names.index(name),): one for name, one in (shape | {"ROWS": rows}).items() if name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    for capability in (80, 90):
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        with open(folder + "/code.ptx", "w") as file:
            file.write(made.asm["ptx"])
        target = re.search(r"[.]target (\\w+)", made.asm["ptx"])[1]
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name", target, file.name, "-o", folder + "/code.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        print(json.dumps({
            "name": kernel.fn.__name__, "capability": capability, "shared": made.metadata.shared,
            "spills": sum(map(int, re.findall(r"(\\d+) bytes spill", said))),
            "fused": "fma.rn.f32" in made.asm["ptx"], "vectors": "ld.global.v4" in made.asm["ptx"],
        }))
"""


def compiled(dtype: str, dim: int, folder: str) -> list[dict[str, Any]]:
    """What is known of each kernel, for each compute capability."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder}
    command = [sys.executable, "-c", COMPILED, dtype, str(dim), folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("dtype,dim", [("bf16", 64), ("bf16", 256), ("fp32", 256)])
def test_the_kernels_compile_for_a_gpu(dtype: str, dim: int, tmp_path: Path) -> None:
    """Sums are not fused with products, whole vectors of an entry are loaded, and programs fit on every GPU. Those of a
    step keep numbers of 16 bits in registers."""
    found = compiled(dtype, dim, str(tmp_path))
    assert [one["name"] for one in found[::2]] == [STEP, "combine", CHUNK, "write_entries"]
    for one in found:
        print(one)
        assert one["shared"] <= SMALLEST, one
        assert not one["fused"] or dtype == "fp32", one  # whose products are made of fused ones
        assert one["vectors"] or one["name"] not in (STEP, CHUNK)
        assert not one["spills"] or one["name"] == CHUNK or dtype == "fp32", one
