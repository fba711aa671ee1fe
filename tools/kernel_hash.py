"""Compare what the native library's kernels compute on every instruction set that can run here.

python tools/kernel_hash.py [--all] [--write]

It builds the program of tests/native/hash.cpp and runs it for each path: those of this processor, in the library that
is installed, the sources for AVX-512 and AVX-VNNI by SIMDe where the processor has not these, and aarch64 under
qemu-user. All hashes have to be the same, and those of tests/native/hashes.txt, which --write writes anew. What cannot
run here is named; with --all that is a failure. Debian's packages that it needs are installed where apt-get is there
and the user is root or may become root by sudo without a password. Standard library only.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KNOWN = ROOT / "tests" / "native" / "hashes.txt"
COMPILERS = ("c++", "g++", "clang++")
CROSS = "aarch64-linux-gnu-g++"
PACKAGES = {CROSS: "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}
"""Programs, and Debian's packages of them."""
SIMDE = "libsimde-dev"
Hashes = dict[str, str]


def main() -> None:
    """Build, run and compare; a difference ends the program with exit code 1."""
    parser = argparse.ArgumentParser(description="Compare what kernels compute on every instruction set.")
    parser.add_argument("--all", action="store_true", help="fail where a path cannot run here")
    parser.add_argument("--write", action="store_true", help="write tests/native/hashes.txt")
    asked = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # cmake from PyPI
    left: list[str] = []
    if shutil.which("cmake") and any(map(shutil.which, COMPILERS)):
        compare(asked.write, left)
    else:
        left.append("all paths: there is no cmake or no C++ compiler")
    for path in left:
        print(f"  not run, {path}")
    if left and asked.all:
        sys.exit("Not every path was run.")


def compare(write: bool, left: list[str]) -> None:
    """Run every path that can run here, and add to ``left`` what cannot, and why."""
    known = {} if write or not KNOWN.is_file() else read(KNOWN.read_text())
    differ = False
    for name, text in runs(left):
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
    """Return hashes by kernel. A line that does not end in one is a finding of the program itself, and a failure."""
    lines = [re.fullmatch(r"(\S.*?) +([0-9a-f]{16})", line) for line in text.splitlines()]
    if not lines or None in lines:
        wrong = [line for line, match in zip(text.splitlines(), lines, strict=True) if match is None]
        sys.exit("The program prints other lines than hashes:\n" + "\n".join(wrong or ["nothing"]))
    return {match[1]: match[2] for match in lines if match}


def runs(left: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name of each run and what the program prints."""
    program = linked() or built("native")
    paths = output([str(program)]).split()
    for path in paths:
        yield path, output([str(program), path])
    if platform.machine() in ("x86_64", "AMD64"):
        yield from by_simde(paths, left)
    if platform.machine() == "x86_64" and sys.platform == "linux":
        yield from by_qemu(left)


def by_simde(paths: list[str], left: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the runs, by SIMDe, of the sources for instructions that this processor lacks."""
    lacking = [path for path in ("avx512", "avxvnni") if path not in paths]
    header = Path("/usr/include/simde/x86/avx512.h")
    if not lacking:
        return
    if "avx2" not in paths or not (header.is_file() or (installed(SIMDE) and header.is_file())):
        left.append(f"{' and '.join(lacking)} by SIMDe: AVX2 and {SIMDE} are needed")
        return
    program = built("simde", "-DKVKEEP_SIMDE=ON", f"-DKVKEEP_ONLY={';'.join(lacking)}")
    for path in lacking:
        yield f"{path} by SIMDe", output([str(program), path])


def by_qemu(left: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the runs of aarch64's paths under qemu."""
    missing = [package for program, package in PACKAGES.items() if not shutil.which(program)]
    if missing and not (installed(*missing) and all(map(shutil.which, PACKAGES))):
        left.append(f"aarch64 under qemu: {' and '.join(missing)} are needed")
        return
    program = built(
        "aarch64", f"-DCMAKE_CXX_COMPILER={CROSS}", "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"
    )
    qemu = ["qemu-aarch64", "-cpu", "max", str(program)]
    for path in output(qemu).split():
        yield f"{path} under qemu", output([*qemu, path])


@functools.cache
def apt() -> list[str]:
    """Return apt-get as a command that may install packages here, with lists that are new; nothing without."""
    command = ["apt-get"] if not os.geteuid() else ["sudo", "-n", "apt-get"]
    if not all(map(shutil.which, (command[0], "apt-get"))):
        return []
    return [] if subprocess.run([*command, "update", "-qq"], capture_output=True, timeout=120).returncode else command


def installed(*packages: str) -> bool:
    """Install Debian's packages where that is possible; return whether it was."""
    if not apt():
        return False
    command = [*apt(), "install", "-y", "-qq", "--no-install-recommends", *packages]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return not subprocess.run(command, capture_output=True, env=environment, timeout=300).returncode


def linked() -> Path | None:
    """Return the program linked with the library of an editable install; None where there is no such library."""
    library, program = ROOT / "src" / "kvkeep" / "native" / "libkvkeep.so", ROOT / "build" / "hash-installed"
    compiler = next(found for name in COMPILERS if (found := shutil.which(name)))
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
