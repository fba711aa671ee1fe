"""Passes are compared by their operators: equal ones have equal notes, wherever new tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from pretended_gpu import GPU, PretendedGpu
from torch import Tensor

from kvkeep.passes.operators import Operators


@pytest.fixture(autouse=True)
def gpu() -> Iterator[PretendedGpu]:
    with PretendedGpu() as entered:
        yield entered


def noted(run: Callable[[], object]) -> Operators:
    with Operators() as seen:
        run()
    return seen


def there(*numbers: float) -> Tensor:
    return torch.tensor(numbers).to(GPU)


def test_passes_over_the_same_memory_are_equal() -> None:
    x, kept = there(1, 2, 3), list[Tensor]()

    def run() -> None:
        kept.append((x * 2).sum() + x[1:].add(1)[0])  # new tensors lie elsewhere each time

    assert noted(run).notes == noted(run).notes and not noted(run).waits


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y: x + 3,
        lambda x, y: x - 2,
        lambda x, y: y + 2,
        lambda x, y: x[:2] + 2,
        lambda x, y: x[1:] + 2,
        lambda x, y: x.double() + 2,
        lambda x, y: (x + 2) * 1,
        lambda x, y: torch.add(x, 2, alpha=2),
        lambda x, y: x + torch.tensor(3.0),
    ],
)
def test_other_operators_numbers_and_memory_are_seen(other: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = there(1, 2, 3), there(1, 2, 3)
    assert noted(lambda: x + 2).notes != noted(lambda: other(x, y)).notes


def test_another_tensor_of_the_pass_is_seen() -> None:
    x = there(1, 2, 3)

    def run(second: bool) -> None:
        pair = x + 1, x + 1
        pair[second].mul(2)

    assert noted(lambda: run(False)).notes != noted(lambda: run(True)).notes


@pytest.mark.parametrize(
    "run,waits",
    [
        (lambda x: float(x[0]), True),
        (lambda x: bool((x > 1).any()), True),
        (lambda x: torch.equal(x, x), True),
        (lambda x: x[x > 1], True),
        (lambda x: x.index_put_((x > 1,), there(5)), True),
        (lambda x: x.nonzero(), True),
        (lambda x: x.cpu(), True),
        (lambda x: torch.ones(3).to(GPU), True),
        (lambda x: torch.tensor(1.0).to(GPU), True),
        (lambda x: x.copy_(torch.ones(3).pin_memory(), non_blocking=True), True),
        (lambda x: x[torch.tensor([0, 2])], True),
        (lambda x: x * torch.tensor(2.0), False),
        (lambda x: x[x.long()], False),
        (lambda x: x.masked_fill_(x > 1, 0.0), False),
        (lambda x: float(torch.ones(3)[0]), False),
    ],
)
def test_what_the_host_waits_for_is_seen(run: Callable[[Tensor], object], waits: bool) -> None:
    x = there(0, 1, 2)
    assert bool(noted(lambda: run(x)).waits) == waits
