"""Builds ik_llama.cpp's server for this processor, and says how to name it for 'kvkeep bench --peers ik_llama.cpp'.

python tools/ik_llama.py SOURCE BUILD
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ON = ("GGML_NATIVE", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_SERVER")


def main(source: str, build: str) -> None:
    """Build the source in the folder ``source`` in the folder ``build``; this takes some ten minutes."""
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", *(f"-D{name}=ON" for name in ON)]
    subprocess.run(["cmake", "-S", source, "-B", build, *options], check=True)
    subprocess.run(["cmake", "--build", build, "--target", "llama-server", "--parallel"], check=True)
    print(f"export KVKEEP_IK_LLAMA_SERVER={Path(build).absolute() / 'bin' / 'llama-server'}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or not (Path(sys.argv[1]) / "CMakeLists.txt").is_file():
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"ik_llama.cpp was not built: {error}")
