"""Numbers for kernels lie in the same memory in every pass that a graph may repeat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerator import DEVICE
from families import tiny
from helpers import prompt, step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvkeep import KeepCache
from kvkeep.engine.answer import forward_one
from kvkeep.engine.batch import Read
from kvkeep.errors import KvkeepError
from kvkeep.passes import graphs
from kvkeep.passes.graphs import StepGraph
from kvkeep.step import choice
from kvkeep.step.constants import Constants, on_device
from kvkeep.step.plan import Span
from kvkeep.stores.sliding import UniformSteps, sliding_layers


def test_equal_numbers_are_in_the_memory_of_the_pass_before() -> None:
    constants, found = Constants(), list[list[Tensor]]()
    for lists in ([[1, 2], [3]], [[1, 2], [3]], [[1, 2], [4]], [[1, 2], [4]]):
        with constants.used():
            found.append([on_device(numbers, DEVICE) for numbers in lists])
        assert [one.tolist() for one in found[-1]] == lists
    first, second, third, last = found
    assert first[0] is second[0] is third[0] is last[0] and first[1] is second[1]
    assert third[1] is not first[1] and third[1] is last[1]
    assert on_device([1, 2], DEVICE) is not first[0]
    constants.fixed = True
    with constants.used():
        assert on_device([1, 2], DEVICE) is first[0]
        with pytest.raises(KvkeepError, match="other numbers"):
            on_device([3], DEVICE)


class NotedKernel:
    """A kernel that notes its launches: the grid, all numbers, and the address of the table."""

    def __init__(self, kernel: Any, launches: list[Any]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            numbers = [one for one in args if not isinstance(one, Tensor)]
            self.launches.append((grid, args[0].data_ptr(), args[0].tolist(), numbers, options))
            self.kernel[grid](*args, **options)

        return launch


def noted_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let kernels attend, and return a list to which their launches are added."""
    pytest.importorskip("triton")
    from kvkeep.step import triton as kernels
    from kvkeep.step.triton import kernels as compiled

    launches = list[Any]()
    monkeypatch.setattr(choice, "kernels_of", lambda device: kernels)
    for name in ("attend_block", "combine"):
        monkeypatch.setattr(compiled, name, NotedKernel(getattr(compiled, name), launches))
    return launches


@pytest.mark.slow
@pytest.mark.parametrize("method,family", [("window", "llama"), ("knorm", "llama"), ("window", "gemma3")])
def test_passes_that_are_compared_launch_kernels_with_the_same_numbers(
    method: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By triton's interpreter. A graph repeats launches with the numbers and the table that they had."""
    launches = noted_kernels(monkeypatch)
    model, ids = tiny(family, layers=2 if family == "gemma3" else 1).to(DEVICE), prompt(1, 40)
    ours, theirs = (KeepCache(model, method, 16) for _ in range(2))
    ours.graph = StepGraph(ours.stream)
    for one in (ours, theirs):
        for window in sliding_layers(one):
            window._steps, window.uniform = UniformSteps(one.ledger), True
        step(model, one, ids[:, :30].to(DEVICE))
    passes = []
    for token in ids[0, 30 : 31 + graphs.TRIALS].tolist():
        launches.clear()
        found = forward_one(model, Read(ours, [token]))
        passes.append([*launches])
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, step(model, theirs, torch.tensor([[token]]).to(DEVICE))[0], rtol=0, atol=0)
    assert len(passes[-1]) >= 2 * len(model.model.layers) and passes[-2] == passes[-1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["snapkv:window=4,kernel=3+verified:6", "duo-attention:sinks=2+verified:5"])
def test_drafts_launch_kernels_with_the_same_numbers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every run, and whichever drafts the exact pass between has taken back."""
    launches = noted_kernels(monkeypatch)
    model, ids, passes = tiny("llama", layers=1).to(DEVICE), prompt(1, 60).to(DEVICE), []
    cache = KeepCache(model, method, 24, checkpoint="kv")
    assert cache.draft_passes is not None
    cache.draft_passes.uniform = True
    cache.graph = StepGraph(cache.stream)
    cache.graph._try = cache.graph._pass
    step(model, cache, ids[:, :50])
    for run in range(2):
        cache.draft_passes.begin(choose=not run)
        for token in ids[0, 50:55].tolist():
            launches.clear()
            assert isinstance(forward_one(model, Read(cache, [token])), Tensor)
            passes.append([*launches])
        cache.stream.abandon()
        step(model, cache, ids[:, 50:55])
        cache.crop(-3)
    assert all(one == passes[-1] for one in passes[2:]) and len(passes[-1]) >= 2


def test_the_host_does_not_wait_until_bounds_and_masks_are_copied() -> None:
    """Those of entries in buffers are made on the host, for each buffer of each layer."""
    calls = pytest.importorskip("kvkeep.step.triton.calls")
    direct = list[bool]()

    class Sent(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            options = kwargs or {}
            if options.get("device") is not None:
                direct.append(options.get("non_blocking", False))
            return func(*args, **options)

    query, bound = torch.empty(2, 1, 1, 16, device="meta"), torch.zeros(1, dtype=torch.int64).expand(2)
    span = Span(*(torch.empty(2, 8, 16, device="meta") for _ in range(2)), 0, 8)
    mask = torch.ones(2, 1, 8, dtype=torch.bool)
    with Sent():
        calls.GpuCall(query, [span], 1.0, first=bound, stop=bound, shift=bound, mask=mask)
    assert direct == [True] * 4
