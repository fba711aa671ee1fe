"""A pretended graph computes nothing while it is captured, repeats the numbers that it was captured with, and refuses
what a graph of CUDA refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from pretended_gpu import GPU, PretendedGpu, Refused
from pretended_graphs import CapturedGraph, pretended_graphs
from torch import Tensor


@pytest.fixture(autouse=True)
def gpu() -> Iterator[PretendedGpu]:
    with PretendedGpu() as entered, pretended_graphs():
        yield entered


def there(*numbers: float) -> Tensor:
    return torch.tensor(numbers).to(GPU)


def captured(run: Callable[[], Tensor | None]) -> tuple[CapturedGraph, Tensor | None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def test_a_capture_computes_nothing_and_a_replay_uses_the_numbers_that_are_there() -> None:
    state, given = there(1, 2), there(10, 20)
    graph, result = captured(lambda: state.add_(given)[:1] * 2)
    assert state.tolist() == [1, 2] and result is not None and result.tolist() == [77]
    graph.replay()
    assert state.tolist() == [11, 22] and result.tolist() == [22]
    given.fill_(0)
    state.mul_(10)
    graph.replay()
    assert state.tolist() == [110, 220] and result.tolist() == [220]


def test_a_number_of_the_host_stays_what_it_was() -> None:
    number, state = 5, there(1)
    graph, result = captured(lambda: state + number)
    number = 6
    graph.replay()
    assert result is not None and result.tolist() == [6]


def test_replays_are_no_launches_of_the_host(gpu: PretendedGpu) -> None:
    state = there(1)
    graph, _ = captured(lambda: state.add_(1))
    gpu.clear()
    graph.replay()
    assert not gpu.kernels and state.tolist() == [2]


@pytest.mark.parametrize(
    "run",
    [
        lambda x: float(x[0]),
        lambda x: x.tolist(),
        lambda x: x[x > 1],
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.ones(2)),
        lambda x: x.copy_(torch.ones(2).pin_memory(), non_blocking=True),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_a_capture_refuses_waits_and_copies(run: Callable[[Tensor], object]) -> None:
    x = there(1, 2)
    with pytest.raises(Refused, match="while a graph is captured"):
        captured(lambda: run(x) and None)


def test_a_replay_refuses_memory_that_is_freed() -> None:
    state = [there(1)]
    graph, _ = captured(lambda: state[0] + 1)
    graph.replay()
    state.clear()
    with pytest.raises(Refused, match="freed"):
        graph.replay()
