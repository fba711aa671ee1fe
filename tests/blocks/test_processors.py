"""A session that was saved on one processor goes on to the bit on any other."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import saved
from families import tiny
from helpers import PLAIN_PATH

from kvkeep import KeepCache, Session, load, load_session, save_session
from kvkeep.native import library

METHODS = (("full", None), ("kv-direct", 64), ("h2o", 64), ("snapkv+verified", 64))


def digests(folder: str, action: str) -> str:
    """Return the digests of the logits after each session in ``folder``; ``action`` "save" saves the sessions first."""
    model = load(folder, weights="bfloat16", device="cpu").model
    ids = torch.randint(2, 97, (1, 640), generator=torch.Generator().manual_seed(1))
    lines = []
    for name, budget in METHODS:
        if action == "save":
            cache = KeepCache(model, name, budget)
            model(ids[:, :600], cache=cache)
            save_session(f"{folder}/{name}", Session(cache, ids[:, :600].tolist()))
        cache = load_session(f"{folder}/{name}", model).cache
        rows = [model(ids[:, at : at + 1], cache=cache).logits for at in range(600, 640)]
        lines.append(f"{name} {hashlib.sha256(torch.cat(rows).view(torch.uint8).numpy().tobytes()).hexdigest()}")
    return "\n".join(lines) + "\n"


def plain_digests(folder: Path) -> str:
    """Return the digests on the plain paths of the library and of torch, which a process chooses at its start."""
    here = PLAIN_PATH | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error::UserWarning:kvkeep", __file__, str(folder), "continue"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | here, check=True, timeout=300)
    assert "is read again" not in done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_a_session_goes_on_to_the_bit_on_every_processor(
    tmp_path: Path, choose: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    saved(tiny("llama", positions=2048), tmp_path)
    best, *others = library.kernels().kvkeep_paths().decode().split()
    choose(best)
    expected = digests(str(tmp_path), "save")
    assert len(expected.splitlines()) == len(METHODS) and others[-1] == "plain"
    assert plain_digests(tmp_path) == expected
    for path in others[:-1]:
        choose(path)
        assert digests(str(tmp_path), "continue") == expected, path
    assert "is read again" not in caplog.text


if __name__ == "__main__":
    print(digests(*sys.argv[1:]), end="")
