"""The kernels of a GPU on the pretended one: what a step with them waits for and copies; and, by triton's interpreter,
the same bits wherever a cache has its entries."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerator import DEVICE
from families import tiny
from helpers import padded, prompt, step
from pretended_gpu import GPU, GpuTensor, PretendedGpu, on_gpu
from torch import Tensor

from kvkeep import KeepCache
from kvkeep.step import choice, native

pytest.importorskip("triton")

from kvkeep.step import triton
from kvkeep.step.triton import calls, kernels

LAYERS = 2
STEP = {
    "full": LAYERS,
    "kv-direct@device": LAYERS,
    "kv-direct@host": 13 * LAYERS,
    "window": LAYERS,
    "knorm": LAYERS,
    "h2o": 0,
    "snapkv+verified@device": LAYERS,
    "snapkv+verified@host": 7 * LAYERS,
}
"""How many copies a step makes to the device, all of them from pinned memory: one of numbers in each layer. ``h2o``
attends by plain operations. From the host, each page in each buffer is a copy, and so are the numbers and the bounds of
each launch."""
BUDGET, LENGTH, STEPS = 320, 700, 4


class OnGpu:
    """A kernel that takes tensors of the pretended GPU only, and runs if it ``computes``."""

    def __init__(self, kernel: Any, computes: bool) -> None:
        self.kernel, self.computes = kernel, computes

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **options: Any) -> None:
            assert not any(isinstance(one, Tensor) and not isinstance(one, GpuTensor) for one in given)
            if self.computes:
                inner = [one.inner if isinstance(one, GpuTensor) else one for one in given]
                self.kernel[grid](*inner, **options)

        return launch


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with PretendedGpu() as entered:
        yield entered


def choose(patches: pytest.MonkeyPatch, computes: bool) -> None:
    """Let the kernels attend on the pretended GPU."""

    def kernels_of(device: torch.device) -> ModuleType:
        return triton if device.type == "cuda" else native

    patches.setattr(choice, "kernels_of", kernels_of)
    for name in ("attend_block", "combine", "attend_chunk", "write_entries"):
        patches.setattr(kernels, name, OnGpu(getattr(kernels, name), computes))


def cache_of(model: Any, name: str) -> KeepCache:
    method, _, where = name.partition("@")
    options = {"checkpoint": "kv", "where": where} if where else {}
    return KeepCache(model, method, None if name == "full" else BUDGET, **options)


@torch.no_grad()
@pytest.mark.parametrize("name", STEP)
def test_a_step_waits_for_nothing_and_copies_numbers_once_a_layer(
    name: str, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, computes=False)
    model = on_gpu(copy.deepcopy(tiny("llama", LAYERS, 1024)).bfloat16())
    cache, ids = cache_of(model, name), prompt(1, LENGTH).to(GPU)
    for part in (ids[:, :-STEPS], ids[:, -STEPS : 1 - STEPS]):
        model(part, cache=cache, logits_to_keep=1)  # the first step sends the table of full pages, too
    seen = list[int]()
    for token in ids[:, 1 - STEPS :].split(1, 1):
        gpu.clear()
        model(token, cache=cache)
        assert not gpu.waits and {*gpu.copies} <= {"to device, pinned", "to host, pinned"}, (gpu.waits, gpu.copies)
        seen.append(gpu.copies["to device, pinned"])
    assert max(seen) <= STEP[name], "a step copies more"
    assert max(seen) == STEP[name], f"a step copies less: make it {max(seen)} in STEP"


@torch.no_grad()
@pytest.mark.parametrize("name", ["kv-direct@device", "kv-direct@host"])
def test_attention_of_padded_rows_waits_for_nothing(
    name: str, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask is read once for each pass, and the bounds of entries in buffers follow from it on the host."""
    choose(monkeypatch, computes=False)
    model = on_gpu(copy.deepcopy(tiny("llama", LAYERS, 1024)).bfloat16())
    cache, (ids, mask) = cache_of(model, name), padded([LENGTH, LENGTH - 90])
    for start, stop in ((0, LENGTH - 40), (LENGTH - 40, LENGTH - 1), (LENGTH - 1, LENGTH)):
        seen = mask[:, :stop].to(GPU)
        gpu.clear()
        step(model, cache, ids[:, start:stop].to(GPU), seen, position_ids=seen.cumsum(1)[:, start:stop] - 1)
        assert not [one for one in gpu.waits if "step/" in one or "stores/" in one], gpu.waits


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="triton interprets nothing")
def test_entries_in_the_hosts_memory_have_the_bits_of_entries_on_the_device(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through buffers, in chunks and in steps, more than a block of them, also after a crop."""
    choose(monkeypatch, computes=True)
    model = on_gpu(copy.deepcopy(tiny("llama", 1, 1024)).bfloat16())
    ids, found = prompt(1, LENGTH).to(GPU), dict[str, Tensor]()
    for name in ("full", "kv-direct@host"):
        cache = cache_of(model, name)
        read = [model(part, cache=cache, logits_to_keep=1).logits.cpu() for part in ids[:, :-STEPS].split(256, 1)]
        cache.crop(-7)
        for token in ids[:, -STEPS - 7 :].split(1, 1):
            read.append(model(token, cache=cache).logits.cpu())
        found[name] = torch.cat(read, 1)
    assert torch.isfinite(found["full"]).all() and torch.equal(*found.values())


# -- a GPU on which they do not run ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_are_tried_before_they_are_used(dtype: torch.dtype) -> None:
    assert calls.works.__wrapped__(DEVICE, dtype)


@pytest.mark.parametrize("broken", ["attend_block", "combine", "attend_chunk"])
@pytest.mark.parametrize("how", ["raises", "computes zeros"])
def test_kernels_that_do_not_run_are_not_used(how: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*given: Any, **options: Any) -> None:
                if how == "raises":
                    raise RuntimeError("Failed to find C compiler.\nPlease specify one.")
                for one in given:
                    if isinstance(one, Tensor) and one.dtype == torch.float32:
                        one.zero_()

            return launch

    monkeypatch.setattr(kernels, broken, Broken())
    reason = "Failed to find C compiler" if how == "raises" else "they differ from torch's operators"
    with pytest.warns(UserWarning, match=f"entries of torch.bfloat16 on '{DEVICE}' \\(.*{reason}"):
        assert not calls.works.__wrapped__(DEVICE, torch.bfloat16)


def test_an_error_of_the_gpu_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "launch", Mock(side_effect=torch.OutOfMemoryError("no memory")))
    with pytest.raises(torch.OutOfMemoryError):
        calls.works.__wrapped__(DEVICE, torch.float32)
