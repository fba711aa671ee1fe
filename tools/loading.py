"""Prints how long a GGUF file takes to load, and the memory of the process then, with kvkeep and with ik_llama.cpp.

python tools/loading.py FILE [ROUNDS]

Each round starts both once: a Python process that imports kvkeep, loads the file and generates one token, and
llama-server of ik_llama.cpp (its path in KVKEEP_IK_LLAMA_SERVER), until it answers and has generated one token, without
and with repacked weights. Memory is Pss, in bytes: for kvkeep without that of its imports, which is
printed beside it. Files are read once before, so that they come from the page cache, if it can hold them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

KVKEEP = """
import json, sys, time
from pathlib import Path

def pss():
    return int(Path("/proc/self/smaps_rollup").read_text().split("Pss:")[1].split()[0]) * 1024

import kvkeep, kvkeep.models.loading, torch, transformers
before, start = pss(), time.perf_counter()
loaded = kvkeep.load(sys.argv[1])
seconds = time.perf_counter() - start
ids = torch.tensor([[1, 2, 3]])
loaded.model.generate(ids, cache=kvkeep.KeepCache(loaded.model), max_new_tokens=1, do_sample=False)
print(json.dumps({"load_s": seconds, "bytes": pss() - before, "imports": before}))
"""


def main(file: str, rounds: int) -> None:
    """Print one line of JSON for each load."""
    with open(file, "rb") as all_of_it:
        while all_of_it.read(1 << 24):
            pass
    print(json.dumps({"file": Path(file).name, "bytes": Path(file).stat().st_size}), flush=True)
    for _ in range(rounds):
        said = subprocess.run([sys.executable, "-c", KVKEEP, file], check=True, capture_output=True, text=True).stdout
        print(json.dumps({"engine": "kvkeep"} | json.loads(said)), flush=True)
        for options in ([], ["-rtr"]):
            print(json.dumps({"engine": " ".join(["ik_llama.cpp", *options])} | ik_llama(file, options)), flush=True)


def ik_llama(file: str, options: list[str]) -> dict[str, float]:
    """Return the seconds until the server answers, and the bytes that it has after one token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    program = os.environ["KVKEEP_IK_LLAMA_SERVER"]
    command = [program, "-m", file, "-t", "2", "-c", "512", "-np", "1", "--log-disable"]
    command += ["--port", url.rsplit(":")[-1], *options]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not answers(url + "/health"):
            time.sleep(0.05)
        seconds = time.perf_counter() - start
        body = json.dumps({"prompt": [1, 2, 3], "n_predict": 1}).encode()
        urllib.request.urlopen(
            urllib.request.Request(url + "/completion", body, {"Content-Type": "application/json"})
        ).read()
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        return {"load_s": seconds, "bytes": int(rollup.split("Pss:")[1].split()[0]) * 1024}
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    """Tell whether a server answers there."""
    try:
        urllib.request.urlopen(url).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 2)
