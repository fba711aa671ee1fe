"""Every path of the native library computes the same logits, with layers of every form that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from conftest import saved
from families import BESIDE_RECURRENT, LAYOUTS
from helpers import PLAIN_PATH
from transformers import AutoModelForCausalLM

from kvkeep import KeepCache
from kvkeep.models.loading import load
from kvkeep.native import library

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for each model. Recurrent modules get decays that differ from head to head."""
    made = tmp_path_factory.mktemp("paths")
    for name, config in (LAYOUTS | BESIDE_RECURRENT).items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config())
        for parameter, numbers in model.named_parameters():
            if parameter.endswith(("A_log", "dt_bias")):
                torch.nn.init.uniform_(numbers, 0, 2)
        saved(model, made / name.replace(" ", "-"))
    return made


@torch.no_grad()
def digests(folder: Path) -> dict[str, str]:
    """Of each model: a digest of the logits of a prompt and of four tokens after it."""
    found = {}
    for one in sorted(folder.iterdir()):
        model = load(one, weights="bfloat16", device="cpu").model
        ids, cache = torch.arange(70)[None] * 7919 % model.config.vocab_size, KeepCache(model, "full")
        logits = [model(part, cache=cache, use_cache=True).logits for part in ids.split([66, 1, 1, 1, 1], 1)]
        found[one.name] = sha256(torch.cat(logits, 1).float().numpy().tobytes()).hexdigest()
    return found


@pytest.mark.slow
def test_every_path_computes_the_same_logits(folder: Path, choose: Callable[[str], None]) -> None:
    """torch chooses its path as it starts, so the plain one takes an interpreter."""
    command = [sys.executable, __file__, str(folder)]
    here = os.environ | PLAIN_PATH | {"PYTHONPATH": os.pathsep.join(sys.path)}
    plain = json.loads(subprocess.run(command, capture_output=True, text=True, env=here, check=True).stdout)
    assert {*plain} == {one.name for one in folder.iterdir()} and len({*plain.values()}) == len(plain)
    for path in library.kernels().kvkeep_paths().decode().split():
        if path != "plain":
            choose(path)
            assert digests(folder) == plain, path


if __name__ == "__main__":
    print(json.dumps(digests(Path(sys.argv[1]))))
