"""The pretended GPU computes what the CPU computes, refuses what a GPU refuses, and counts waits and copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from pretended_gpu import GPU, GpuTensor, PretendedGpu, Refused, on_gpu
from torch import Tensor


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with PretendedGpu() as entered:
        yield entered


def there(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel()), device="cuda").view(shape)


def test_results_are_those_of_the_cpu_and_stay_on_the_device(gpu: PretendedGpu) -> None:
    linear = torch.nn.Linear(4, 3, dtype=torch.bfloat16).requires_grad_(False)
    given = torch.randn(2, 4, dtype=torch.bfloat16)
    expected = linear(given)
    found = on_gpu(linear)(given.to("cuda"))
    assert isinstance(found, GpuTensor) and found.device == GPU and found.is_cuda
    assert torch.equal(found.cpu(), expected)


def test_views_share_memory_and_writes_return_the_same_tensor(gpu: PretendedGpu) -> None:
    whole = there(4, 3)
    assert whole[1:3].zero_().data_ptr() != whole.data_ptr()
    assert whole.add_(1) is whole
    assert whole.tolist() == [[1, 2, 3], [1, 1, 1], [1, 1, 1], [10, 11, 12]]
    assert set(gpu.kernels) == {"arange", "zero_", "add_"}


@pytest.mark.parametrize(
    "asked",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: torch.ones(3)[x.long()],
        lambda x: torch.dot(x, x.cpu()),
        lambda x: torch.stack([x[0], torch.tensor(1.0)]),
        lambda x: x.numpy(),
        lambda x: x.uniform_(generator=torch.Generator()),
        lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*3 * [x.view(1, 1, 1, 3)]),
    ],
)
def test_a_gpu_refuses(asked: Callable[[Tensor], object], gpu: PretendedGpu) -> None:
    with pytest.raises(Refused, match="GPU: "):
        asked(there(3))


@pytest.mark.parametrize(
    "asked,waits",
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: bool(x[0] > 1), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: x[x > 1], 1),
        (lambda x: x[[0, 2]], 1),
        (lambda x: x[torch.tensor([0, 2])], 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: torch.ones(3).to("cuda"), 1),
        (lambda x: torch.tensor([1.0], device="cuda"), 1),
        (lambda x: torch.ones(3).copy_(x, non_blocking=True), 1),
        (lambda x: x.copy_(torch.ones(3).pin_memory()), 1),
        (lambda x: x.copy_(torch.ones(3, 2).pin_memory()[:, 0], non_blocking=True), 1),
        (lambda x: torch.cuda.synchronize(), 1),
        (lambda x: torch.cuda.Event().synchronize(), 1),
        (lambda x: x.copy_(torch.ones(3).pin_memory(), non_blocking=True), 0),
        (lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True), 0),
        (lambda x: x.to("cpu", non_blocking=True), 0),
        (lambda x: x[x.long()], 0),
        (lambda x: x * torch.tensor(2.0), 0),
        (lambda x: x.masked_fill_(x > 1, 0.0), 0),
        (lambda x: torch.where(x > 1, x, 0.0), 0),
        (lambda x: x.float().to(GPU).bfloat16(), 0),
    ],
)
def test_what_waits_is_counted(asked: Callable[[Tensor], object], waits: int, gpu: PretendedGpu) -> None:
    x = there(3)
    gpu.clear()
    asked(x)
    assert gpu.waits.total() == waits, gpu.waits


def test_copies_are_counted_by_direction_and_memory(gpu: PretendedGpu) -> None:
    x, pinned = there(3, 2), torch.empty(3, 2, pin_memory=True)
    pinned.copy_(x)
    x.copy_(pinned, non_blocking=True)
    pinned[:, 0].copy_(x[:, 0])
    assert pinned.is_pinned() and not x.cpu().is_pinned()
    assert gpu.copies == {
        "to host, pinned": 1,
        "to device, pinned": 1,
        "to host, pinned by pageable": 1,
        "to host, pageable": 1,
    }
    assert gpu.copied_bytes["to host, pinned by pageable"] == 12


def test_scores_of_bfloat16_products_are_float32_as_on_a_gpu(gpu: PretendedGpu) -> None:
    a, b = torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 8, 5).bfloat16()
    found = torch.bmm(a.to(GPU), b.to(GPU), out_dtype=torch.float32)
    assert torch.equal(found.cpu(), torch.bmm(a.float(), b.float()))


def test_a_thread_that_begins_in_the_block_has_the_device(gpu: PretendedGpu) -> None:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(there(2)))
    thread.start()
    thread.join()
    assert found[0].device == GPU


def test_torch_is_as_before_after_the_block() -> None:
    before = torch.tensor, Tensor.to, torch.cuda.Stream, threading.Thread.run, torch.cuda.is_available()
    with PretendedGpu():
        assert torch.cuda.is_available()
    assert before == (torch.tensor, Tensor.to, torch.cuda.Stream, threading.Thread.run, torch.cuda.is_available())
