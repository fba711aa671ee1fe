"""Models that are split over processes or devices: results are equal, or the method is refused by name."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import small
from cases import CASES, taken
from families import tiny
from helpers import prompt
from torch import Tensor, distributed
from torch.multiprocessing.spawn import start_processes
from transformers import AutoModelForCausalLM

from kvkeep import KeepCache, SessionError, UnsupportedModelError, UsageError
from kvkeep.blocks.sessions import check_savable
from kvkeep.models.adapter import devices, processes
from kvkeep.serve.engine import Engine

STEPS = 1
REFUSED = {"random", "tova", "duo-attention:sinks=2", "kvzip:sinks=2", "h2o-fisher", "window+verified:7"}
SUPPORTED = {"full", "static", "kv-direct", "window", "h2o", "snapkv", "revive", "h2o+merge", "quantized:4"}
"""Methods that need all heads in one process, and that do not; all others are measured."""
NAMES = [name for name in CASES if taken(name, "llama") and not CASES[name].gradients]


def logits(name: str, model: Any) -> Tensor:
    """Of the next token after a text, and after each of a few more; (STEPS + 1, vocabulary)."""
    case = CASES[name]
    given = {"budget": case.budget, "chunk": case.chunk} | dict(case.options)
    if case.method.oneshot:
        del given["chunk"]
    cache, ids = KeepCache(model, case.spec, **given), prompt(1, case.length + STEPS)
    rows = []
    for start, stop in [(0, case.length), *((at, at + 1) for at in range(case.length, case.length + STEPS))]:
        with torch.no_grad():
            rows.append(model(ids[:, start:stop], cache=cache, logits_to_keep=1).logits[:, -1])
    return torch.cat(rows)


def half(rank: int, folder: str, port: int) -> None:
    """One of two processes, each with half of the heads."""
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    assert processes(model) == 2
    found: dict[str, Tensor | str] = {}
    for name in NAMES:
        try:
            found[name] = logits(name, model)
        except (UnsupportedModelError, UsageError) as error:
            found[name] = str(error)
    torch.save(found, f"{folder}/found{rank}")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_methods_with_heads_split_over_two_processes_work_or_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("llama").save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    start_processes(half, (str(tmp_path), port), 2, start_method="fork")
    ranks = [torch.load(tmp_path / f"found{rank}") for rank in range(2)]
    refused = {CASES[name].spec for name, found in ranks[0].items() if isinstance(found, str)}
    assert refused > REFUSED and not refused & SUPPORTED
    for name in NAMES:
        one, other = (found[name] for found in ranks)
        if isinstance(one, str):
            assert one == other and "process" in one
            continue
        off = (one - logits(name, tiny("llama"))).abs().amax(1)
        assert torch.equal(one, other) and off[0] < 1e-4, name
        assert off.max() < (1e-2 if CASES[name].waits else 1e-4), name  # a code may be the next one


@pytest.mark.parametrize("method", ["full", "kv-direct", "revive", "kvzip"])
def test_offloaded_layers_work_and_several_devices_are_refused(method: str, tmp_path: Path) -> None:
    """Offloaded layers run on the first device; the second accelerator is made up."""
    tiny("llama").save_pretrained(tmp_path / "model")
    parts = ["embed_tokens", *(f"layers.{number}" for number in range(3)), "norm", "rotary_emb"]
    places = {"model.layers.3": "disk", "lm_head": "cpu"} | {f"model.{part}": "cpu" for part in parts}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "off"
    ).eval()
    budget = None if method == "full" else 128
    assert devices(model) == ["cpu"] and devices(tiny("llama")) == []
    ids = prompt(1, 40)
    with torch.no_grad():
        both = [one(ids, cache=KeepCache(one, method, budget)).logits for one in (model, tiny("llama"))]
    assert torch.equal(*both)
    model.hf_device_map |= {"model.layers.0": "cuda:0", "model.layers.1": "cuda:1"}
    assert devices(model) == ["cuda:0", "cuda:1"]
    if method == "full":
        KeepCache(model, method)
        return
    with pytest.raises(UnsupportedModelError, match=r"several devices \(cuda:0, cuda:1\)"):
        KeepCache(model, method, budget)
    model.hf_device_map = {"": "disk"}
    model.to_empty(device="meta")
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        KeepCache(model, method, budget)


def test_serving_and_sessions_refuse_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(tiny("llama")), "tp_size", 2)
    with pytest.raises(UnsupportedModelError, match="tensor parallel"):
        Engine(small("llama"), 10**9)
    with pytest.raises(SessionError, match="2 processes"):
        check_savable(KeepCache(tiny("llama"), "full"))
