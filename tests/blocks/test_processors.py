"""A session that was saved on one processor goes on to the bit on any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import saved
from families import tiny

from kvkeep.native import library

PROGRAM = """
import hashlib, sys, torch
from kvkeep import KeepCache, Session, load, load_session, save_session
folder, action = sys.argv[1:]
model = load(folder, weights="bfloat16", device="cpu").model
ids = torch.randint(2, 97, (1, 640), generator=torch.Generator().manual_seed(1))
for name, budget in (("full", None), ("kv-direct", 64), ("h2o", 64), ("snapkv+verified", 64)):
    if action == "save":
        cache = KeepCache(model, name, budget)
        model(ids[:, :600], cache=cache)
        save_session(f"{folder}/{name}", Session(cache, ids[:, :600].tolist()))
    cache = load_session(f"{folder}/{name}", model).cache
    rows = [model(ids[:, at : at + 1], cache=cache).logits for at in range(600, 640)]
    print(name, hashlib.sha256(torch.cat(rows).view(torch.uint8).numpy().tobytes()).hexdigest())
"""


def run(folder: Path, action: str, path: str) -> str:
    """Return the digests of a session's logits on a path of the library, in a process of its own."""
    here = {"PYTHONPATH": os.pathsep.join(sys.path), "KVKEEP_CPU": path}
    if path == "plain":
        here["ATEN_CPU_CAPABILITY"] = "default"
    command = [sys.executable, "-W", "error::UserWarning:kvkeep", "-c", PROGRAM, str(folder), action]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | here, check=True, timeout=300)
    assert "is read again" not in done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_a_session_goes_on_to_the_bit_on_every_processor(tmp_path: Path) -> None:
    saved(tiny("llama", positions=2048), tmp_path)
    best, *others = library.kernels().kvkeep_paths().decode().split()
    expected = run(tmp_path, "save", best)
    assert others and len(expected.splitlines()) == 4
    for path in others:
        assert run(tmp_path, "continue", path) == expected, path
