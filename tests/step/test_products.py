"""Scores of 16-bit queries and keys are float32, whatever computes them; and what a flash kernel of a GPU gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pretended_gpu
import pytest
import torch
from pretended_gpu import GPU, PretendedGpu
from torch import Tensor

from kvkeep.attention.attend import attend, attend_scored, received
from kvkeep.step import products
from kvkeep.step import torch as plain
from kvkeep.step.plan import Segment
from kvkeep.step.products import flash, product

SCALING = 0.4
BMM, FLASH = torch.ops.aten.bmm.dtype, torch.ops.aten._scaled_dot_product_flash_attention.default


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with PretendedGpu() as entered:
        forget()
        yield entered
    forget()


def forget() -> None:
    """Forget what a device can do."""
    products._sums_float32.cache_clear()  # type: ignore[attr-defined]
    products._flash_works.cache_clear()  # type: ignore[attr-defined]


def numbers(*shape: int, seed: int = 0, device: torch.device = GPU) -> Tensor:
    """Numbers whose scores are as large as 40."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.mul(3).bfloat16().to(device)


def exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Attention in float64: the output, the log-sum-exp of the scores, and the weights."""
    query, key, value = (one.cpu().double() for one in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = SCALING * query @ key.transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(~mask.cpu(), float("-inf"))
    weights = scores.softmax(-1)
    return weights @ value, scores.logsumexp(-1), weights


@pytest.mark.parametrize("queries", [1, 9])
def test_a_gpu_computes_a_limited_number_of_scores_at_a_time(
    queries: int, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a mask for each query, or one for all of them."""
    query, key, value = numbers(2, 4, 9, 24), numbers(2, 2, 30, 24, seed=1), numbers(2, 2, 30, 16, seed=2)
    mask = (numbers(2, 1, queries, 30, seed=3) > -1).to(GPU)
    monkeypatch.setattr(plain, "MAX_SCORES", limit := 700)
    counts, multiply = list[int](), plain.product
    monkeypatch.setattr(plain, "product", lambda *given: counts.append((made := multiply(*given)).numel()) or made)
    output, lse = plain.partial(query, Segment(key, value, mask), SCALING)
    wanted = exact(query, key, value, mask)
    assert len(counts) == 2 * 4 and max(counts) <= limit
    assert float((output.cpu() - wanted[0]).abs().max()) < 0.05 and float((lse.cpu() - wanted[1]).abs().max()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_sums_of_a_product_are_not_rounded(place: str, dtype: torch.dtype, gpu: PretendedGpu) -> None:
    a, b = (numbers(*shape, device=torch.device("cpu")).to(dtype) for shape in ((3, 5, 64), (3, 64, 7)))
    found = product(a.to(place), b.to(place)).cpu()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), a.double() @ b.double(), atol=1e-4, rtol=1e-6)


def test_a_gpu_multiplies_16_bits_without_copies_in_float32(gpu: PretendedGpu) -> None:
    a = numbers(2, 16, 16)
    product(a, a)
    gpu.clear()
    product(a, a)
    assert dict(gpu.kernels) == {"bmm": 1} and not gpu.waits


MASK = torch.arange(30) % 7 != 2


@pytest.mark.parametrize("dim", [16, 12])
@pytest.mark.parametrize("kind", ["seen", "masked", "causal"])
def test_attention_on_a_gpu_has_the_scores_of_float64(kind: str, dim: int, gpu: PretendedGpu) -> None:
    query, key, value = numbers(2, 4, 30, dim), numbers(2, 2, 30, dim, seed=1), numbers(2, 2, 30, dim, seed=2)
    seen = {"seen": None, "masked": MASK.view(1, 1, 1, 30), "causal": torch.ones(1, 1, 30, 30).tril().bool()}[kind]
    mask = MASK.view(1, 1, 1, 30).to(GPU) if kind == "masked" else None
    output, lse = attend(query, [Segment(key, value, mask, causal=kind == "causal")], SCALING)
    wanted, wanted_lse, _ = exact(query, key, value, seen)
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, atol=1e-4, rtol=0)
    assert (
        float((output.cpu() - wanted).norm() / wanted.norm()) < 0.004
    )  # half a bit of bfloat16, of weights and output
    assert gpu.kernels["_scaled_dot_product_flash_attention"] == (0 if dim == 12 or kind == "masked" else 4)


def test_recorded_weights_are_those_of_float64(gpu: PretendedGpu) -> None:
    query, key, value = numbers(2, 4, 1, 16), numbers(2, 2, 30, 16, seed=1), numbers(2, 2, 30, 16, seed=2)
    wanted, lse, weights = exact(query, key, value)
    parts = [Segment(key[:, :, low:high], value[:, :, low:high]) for low, high in ((0, 11), (11, 30))]
    output, found = attend_scored(query, parts, SCALING)
    torch.testing.assert_close(torch.cat(found, 1).cpu().double(), weights.mean(1)[:, 0], atol=1e-5, rtol=0)
    assert float((output.cpu() - wanted).norm() / wanted.norm()) < 0.004
    again = received(query, parts[0], lse.float().to(GPU), SCALING)
    torch.testing.assert_close(again.cpu().double(), weights.mean(1)[:, 0, :11], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.cpu(),
        lambda x: x.float(),
        lambda x: x[..., :12],
        lambda x: x.repeat(1, 1, 1, 10),
        lambda x: x.flatten()[4 : 4 + x[:1].numel()].view(x[:1].shape),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    ],
    ids=["of the CPU", "float32", "12 numbers", "320 numbers", "not aligned", "turned"],
)
def test_the_flash_kernel_gets_only_what_it_takes(change: Callable[[Tensor], Tensor], gpu: PretendedGpu) -> None:
    x = numbers(2, 2, 5, 32)
    assert flash(x, x, x, False, SCALING) is not None
    other = change(x)
    assert flash(other, other, other, False, SCALING) is None


def missing(*given: Any, **options: Any) -> Any:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def wrong(*given: Any, **options: Any) -> Any:
    output, lse, *rest = KERNELS[FLASH](*given, **options)
    return output, lse + 1, *rest


KERNELS = dict(pretended_gpu.KERNELS)


@pytest.mark.parametrize("kernel", [missing, wrong])
def test_a_gpu_whose_kernels_fail_a_trial_multiplies_float32(
    kernel: Callable[..., Any], gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pretended_gpu.KERNELS, FLASH, kernel)
    monkeypatch.setitem(pretended_gpu.KERNELS, BMM, missing)
    query, key, value = (numbers(2, 2, 5, 16, seed=seed) for seed in range(3))
    assert flash(query, key, value, False, SCALING) is None
    _, lse = attend(query, [Segment(key, value)], SCALING)
    torch.testing.assert_close(lse.cpu().double(), exact(query, key, value)[1], atol=1e-4, rtol=0)


def test_lack_of_memory_is_no_lack_of_a_kernel(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setitem(pretended_gpu.KERNELS, FLASH, full)
    x = numbers(1, 2, 5, 16)
    with pytest.raises(torch.OutOfMemoryError):
        flash(x, x, x, False, SCALING)
