"""The kernel gives what plain operations give, on its own, among other segments, and within a cache.

On a GPU it runs as it is. Elsewhere Triton's interpreter runs it, which has to be asked for before Triton is imported:
one test here starts this file again with that asked for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny
from torch import Tensor

from kvkeep import KeepCache
from kvkeep.attention import Segment, attend, recall, recall_attend
from kvkeep.memory.meter import Meter
from kvkeep.models.binding import bind
from kvkeep.models.projection import Projection
from kvkeep.stores.checkpoints.lazy_page import LazyPage

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
READ = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "qwen3_moe")
"""Families whose weights can be read."""

with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (it is for Linux)")
kernel_test = pytest.mark.skipif(
    find_spec("triton") is None or (DEVICE == "cpu" and not INTERPRETED),
    reason="runs on a GPU, or in Triton's interpreter by test_in_the_interpreter",
)


@with_triton
@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernel's tests run by themselves here")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "the_kernel", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def on_this_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the dispatcher take the kernel on the device of these tests."""
    monkeypatch.setattr(recall, "DEVICES", (DEVICE,))
    recall._agrees.cache_clear()
    yield
    recall._agrees.cache_clear()


def case(
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 2,
    entries: int = 50,
    hidden_size: int = 40,
    kv_heads: int = 2,
    groups: int = 3,
    dim: int = 16,
    queries: int = 2,
    everything: bool = True,
) -> tuple[Tensor, Tensor, Projection, tuple[Tensor, Tensor], float]:
    """Return arguments of recall_attend; ``everything``: with biases, a norm on the keys, and norms of 1 + w."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    width = kv_heads * dim
    projection = Projection(
        random(hidden_size),
        1.0 if everything else 0.0,
        1e-6,
        random(width, hidden_size) * hidden_size**-0.5,
        random(width, hidden_size) * hidden_size**-0.5,
        dim,
        *((random(width), random(width), random(dim), 1e-5) if everything else ()),
    )
    angle = torch.rand(batch, entries, dim, generator=generator).to(DEVICE) * 6.28
    angles = angle.cos().to(dtype), angle.sin().to(dtype)
    return random(batch, kv_heads * groups, queries, dim), random(batch, entries, hidden_size), projection, angles, 0.3


def same(mine: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    assert (mine[1].isneginf() == reference[1].isneginf()).all()
    for ours, theirs in zip(mine, reference, strict=True):
        assert ours.dtype == torch.float32 and ours.shape == theirs.shape
        assert recall.close(ours.nan_to_num(neginf=0.0), theirs.nan_to_num(neginf=0.0), dtype)


def mask_of(kind: str, batch: int, queries: int, entries: int) -> Tensor | None:
    """Return a mask in which the first query of the first row sees nothing."""
    if kind == "none":
        return None
    seen = torch.rand(batch, 1, 1 if kind == "padding" else queries, entries, device=DEVICE) > 0.4
    seen[0, 0, 0] = False
    return torch.zeros(seen.shape, device=DEVICE).masked_fill(~seen, float("-inf")) if kind == "added" else seen


@kernel_test
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("none", torch.float32), ("padding", torch.bfloat16), ("seen", torch.float16)),
        *(("added", torch.float32), ("seen", torch.bfloat16), ("padding", torch.float32)),
    ],
)
def test_the_kernel_gives_what_plain_operations_give(kind: str, dtype: torch.dtype) -> None:
    from kvkeep.attention.triton_recall import launch

    given = case(dtype, everything=kind != "padding")
    mask = mask_of(kind, 2, 2, 50)
    reference = recall.formed_attend(*given, mask)
    for block, programs in ((64, 256), (16, 8)):  # one block; several programs of several blocks
        same(launch(*given, mask, block=block, programs=programs), reference, dtype)


@kernel_test
@pytest.mark.parametrize(
    "shape",
    [
        {"entries": 1},
        {"entries": 64, "hidden_size": 128, "dim": 64},
        {"entries": 130, "batch": 1, "kv_heads": 1, "queries": 1},
        {"dim": 8, "hidden_size": 31, "kv_heads": 1},
        {"dim": 80, "groups": 1},
        {"dim": 256, "batch": 1, "entries": 20},
        {"queries": 32, "groups": 4, "entries": 33},
    ],
    ids=str,
)
def test_the_kernel_takes_any_shape(shape: dict[str, int]) -> None:
    from kvkeep.attention.triton_recall import launch

    given = case(**shape)  # type: ignore[arg-type]
    same(launch(*given), recall.formed_attend(*given), torch.float32)


@kernel_test
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_the_kernel_on_a_familys_layers(family: str, on_this_device: None) -> None:
    """Against the model's own modules; then merged with a second segment, against attention over both."""
    model = tiny(family).to(DEVICE)
    adapter = bind(model)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 45, 32, generator=generator).to(DEVICE)
    positions = torch.stack([torch.arange(7, 52), torch.arange(45)]).to(DEVICE)
    for layer in (2, 3):  # gemma3's differ in their windows and rotations
        projection = adapter.projection(layer)
        assert projection is not None
        query = torch.randn(2, 4, 3, projection.head_dim, generator=generator).to(DEVICE)
        mask = mask_of("seen", 2, 3, 45)
        cosines, sines = (angles[:, :30] for angles in adapter.rotation(layer, hidden, positions))
        page = LazyPage(projection, hidden[:, :30], (cosines, sines), Meter())
        assert recall.fused(query, page.hidden, projection) and mask is not None
        with torch.no_grad():
            keys, values = (part.flatten(0, 1)[:, None] for part in adapter.project(layer, hidden, positions))
        query, mask = query.reshape(len(keys), -1, *query.shape[2:]), mask.repeat_interleave(len(keys) // 2, 0)
        rest = Segment(keys[:, :, 30:], values[:, :, 30:], mask[..., 30:])
        output, lse = attend(query, [Segment(page, page, mask[..., :30]), rest], 0.3)
        same((output, lse), attend(query, [Segment(keys, values, mask)], 0.3), torch.float32)


@kernel_test
@pytest.mark.parametrize(("family", "checkpoint"), [("llama", "residual"), ("gemma3", "residual:3")])
def test_the_kernel_within_a_cache(family: str, checkpoint: str, on_this_device: None) -> None:
    """A padded batch: logits as without a bounded cache; where residuals are at hand, no keys or values are written."""
    model = tiny(family, 2).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (2, 42), generator=generator).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        plain = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        cache = KeepCache(model, "kv-direct", 20, checkpoint=checkpoint, where="host", chunk=20, page=32)
        rows = []
        for start, stop in ((0, 40), *((step, step + 1) for step in (40, 41))):
            given: dict[str, Any] = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
            rows.append(model(ids[:, start:stop], past_key_values=cache, **given).logits)
    assert recall._agrees.cache_info().currsize  # it was asked for
    whole = torch.cat(rows, 1)
    torch.testing.assert_close(whole[1], plain[1], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(whole[0, 5:], plain[0, 5:], atol=2e-3, rtol=2e-3)
    if checkpoint == "residual":
        assert cache.memory().peak_workspace_bytes == 0


@pytest.mark.slow
@with_triton
@pytest.mark.skipif(INTERPRETED, reason="compiles, which the interpreter does not")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("target,dtype", [(80, torch.float32), (90, torch.bfloat16)])
def test_it_compiles_for_gpus_that_are_not_here(
    target: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To machine code, with tensor cores, within the shared memory of one block (99 KB on the smallest)."""
    import triton
    from triton.backends.compiler import GPUTarget

    from kvkeep.attention import triton_recall as kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    settings = kernel.settings(dtype, 128, 8)
    options = {name: settings.pop(name) for name in ("num_warps", "num_stages")}
    constants = settings | {"ENTRIES": kernel.ENTRIES, "MASK": 1}
    constants |= dict.fromkeys(("KEY_BIAS", "VALUE_BIAS", "KEY_NORM"), True)
    model = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}[dtype]
    types = {"mask": "*u8", "output": "*fp32", "lse": "*fp32"}
    types |= dict.fromkeys(("query", "hidden", "norm", "key_weight", "value_weight", "key_bias", "value_bias"), model)
    types |= dict.fromkeys(("key_norm", "cos", "sin"), model) | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("scale", "offset", "eps", "key_eps"), "fp32")
    signature = {name: types.get(name, "i32") for name in kernel._recall.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = triton.compiler.ASTSource(kernel._recall, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    assert compiled.asm["cubin"] and compiled.metadata.shared < 99 * 1024
    assert ("wgmma" if target == 90 else "mma.sync") in compiled.asm["ptx"]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_read_where_they_give_the_same(family: str) -> None:
    model = tiny(family)
    adapter = bind(model)
    found = [adapter.projection(layer) for layer in range(4)]
    assert all((projection is not None) == (family in READ) for projection in found)
    hidden, positions = torch.randn(1, 5, 32), torch.arange(11, 16)[None]
    for layer, projection in enumerate(found):
        if projection is not None:
            with torch.no_grad():
                formed = projection.form(hidden, adapter.rotation(layer, hidden, positions))
                modules = adapter.project(layer, hidden, positions)
            torch.testing.assert_close((*formed,), (*modules,), atol=1e-4, rtol=1e-4)


def test_without_a_gpu_plain_operations_are_used() -> None:
    query, hidden, projection, angles, scaling = case()
    if DEVICE == "cpu":
        assert not recall.available(torch.device("cpu")) and not recall.fused(query, hidden, projection)
        given = query, hidden, projection, angles, scaling
        assert all(map(torch.equal, recall_attend(*given), recall.formed_attend(*given)))


@pytest.mark.parametrize("fault", ["absent", "raises", "differs"])
def test_a_kernel_that_does_not_work_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, on_this_device: None
) -> None:
    def broken(query: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        if fault == "raises":
            raise RuntimeError("out of resources")
        return query.float() * 0, query[..., 0].float() * 0

    monkeypatch.setattr(recall, "_kernel", lambda: None if fault == "absent" else broken)
    given = case()
    assert not recall.fused(*given[:3])
    same(recall_attend(*given), recall.formed_attend(*given), torch.float32)


@pytest.mark.parametrize("why", ["rows", "odd", "wide", "dtype"])
def test_the_dispatcher_refuses_what_no_kernel_is_made_for(
    why: str, monkeypatch: pytest.MonkeyPatch, on_this_device: None
) -> None:
    monkeypatch.setattr(recall, "_kernel", lambda: recall.formed_attend)  # which agrees with itself
    query, hidden, projection, *_ = case()
    assert recall.fused(query, hidden, projection)
    if why == "rows":
        query = query.repeat(1, 1, 30, 1)
    elif why == "dtype":
        hidden = hidden.double()
    elif why == "odd":
        projection = replace(projection, head_dim=15)
    else:
        query, hidden, projection, *_ = case(dim=512)
    assert not recall.fused(query, hidden, projection)
