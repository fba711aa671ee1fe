"""Compare what the native library's kernels compute on every instruction set that can run here.

python tools/kernel_hash.py [--write]

It builds the program of tests/native/hash.cpp and runs it for each path: those of this processor, in the library that
is installed, the sources for AVX-512 and AVX-VNNI by SIMDe where the processor has not these, and aarch64 under
qemu-user. All hashes have to be the same, and those of tests/native/hashes.txt, which --write writes anew. What cannot
run here is named. Standard library only.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KNOWN = ROOT / "tests" / "native" / "hashes.txt"
CROSS = "aarch64-linux-gnu-g++"
PACKAGES = {CROSS: "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}
"""Programs, and Debian's packages of them."""
SIMDE = "libsimde-dev"
Hashes = dict[str, str]


def main() -> None:
    """Build, run and compare; a difference ends the program with exit code 1."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # cmake from PyPI
    if not shutil.which("cmake") or not any(map(shutil.which, ("c++", "g++", "clang++"))):
        print("Kernel hashes: not run, there is no cmake or no C++ compiler.")
        return
    write = sys.argv[1:] == ["--write"]
    known = {} if write or not KNOWN.is_file() else read(KNOWN.read_text())
    differ = False
    for name, text in runs():
        found = read(text)
        if not known:
            known, reference = found, text
        differences = sorted(kernel for kernel in known.keys() | found.keys() if known.get(kernel) != found.get(kernel))
        differ |= bool(differences)
        print(f"  {name}: {'DIFFERENT: ' + ', '.join(differences) if differences else 'the same'}", flush=True)
    if differ:
        sys.exit("Kernels do not compute the same everywhere.")
    if write:
        KNOWN.write_text(reference)


def read(text: str) -> Hashes:
    """Return hashes by kernel; a line that ends in anything else than a hash is a finding of the program itself."""
    return dict(line.rsplit(maxsplit=1) for line in text.splitlines())


def runs() -> Iterator[tuple[str, str]]:
    """Yield the name of each run and what the program prints."""
    program = linked() or built("native")
    paths = output([str(program)]).split()
    for path in paths:
        yield path, output([str(program), path])
    if platform.machine() in ("x86_64", "AMD64"):
        yield from by_simde(paths)
    if platform.machine() == "x86_64" and sys.platform == "linux":
        yield from by_qemu()


def by_simde(paths: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the runs, by SIMDe, of the sources for instructions that this processor lacks."""
    lacking = [path for path in ("avx512", "avxvnni") if path not in paths]
    header = Path("/usr/include/simde/x86/avx512.h")
    if not lacking:
        return
    if "avx2" not in paths or not (header.is_file() or (installed(SIMDE) and header.is_file())):
        print(f"  {' and '.join(lacking)} by SIMDe: not run, it needs AVX2 and {SIMDE}")
        return
    program = built("simde", "-DKVKEEP_SIMDE=ON", f"-DKVKEEP_ONLY={';'.join(lacking)}")
    for path in lacking:
        yield f"{path} by SIMDe", output([str(program), path])


def by_qemu() -> Iterator[tuple[str, str]]:
    """Yield the runs of aarch64's paths under qemu."""
    missing = [package for program, package in PACKAGES.items() if not shutil.which(program)]
    if missing and not (installed(*missing) and all(map(shutil.which, PACKAGES))):
        print(f"  aarch64 under qemu: not run, it needs {' and '.join(missing)}")
        return
    program = built(
        "aarch64", f"-DCMAKE_CXX_COMPILER={CROSS}", "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"
    )
    qemu = ["qemu-aarch64", "-cpu", "max", str(program)]
    for path in output(qemu).split():
        yield f"{path} under qemu", output([*qemu, path])


@functools.cache
def updated() -> bool:
    """Return whether apt can install packages here, with lists that are new."""
    if os.geteuid() or not shutil.which("apt-get"):
        return False
    return not subprocess.run(["apt-get", "update", "-qq"], capture_output=True, timeout=120).returncode


def installed(*packages: str) -> bool:
    """Install Debian's packages where that is possible; return whether it was."""
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return updated() and not subprocess.run(command, capture_output=True, env=environment, timeout=300).returncode


def linked() -> Path | None:
    """Return the program linked with the library of an editable install; None where there is no such library."""
    library, program = ROOT / "src" / "kvkeep" / "native" / "libkvkeep.so", ROOT / "build" / "hash-installed"
    compiler = next(found for name in ("c++", "g++", "clang++") if (found := shutil.which(name)))
    if not library.is_file() or sys.platform != "linux":
        return None
    program.parent.mkdir(exist_ok=True)
    source = ROOT / "tests" / "native" / "hash.cpp"
    folder = str(library.parent)
    output(
        [
            compiler,
            "-std=c++17",
            "-O1",
            f"-I{folder}",
            str(source),
            str(library),
            f"-Wl,-rpath,{folder}",
            "-o",
            str(program),
        ]
    )
    return program


def built(name: str, *options: str) -> Path:
    """Build the program and return it; what a build before left is used again."""
    began, folder = time.monotonic(), ROOT / "build" / f"hash-{name}"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    output(["cmake", *generator, "-S", str(ROOT), "-B", str(folder), *options])
    output(["cmake", "--build", str(folder), "--target", "kvkeep_hash", "--parallel", str(os.cpu_count() or 1)])
    print(f"Kernel hashes, {name}: built in {time.monotonic() - began:.0f} s", flush=True)
    return folder / "kvkeep_hash"


def output(command: list[str]) -> str:
    """Return what a command prints; one that fails ends the program."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} left with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
