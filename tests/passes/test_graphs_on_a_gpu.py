"""Steps in graphs on a GPU, where there is one: all else about them is pretended (:mod:`test_graphs`)."""

from __future__ import annotations

import copy
import time
import warnings

import pytest
import torch
from accelerator import DEVICE
from captured import CAPTURED, CAPTURED_FAMILIES, LENGTH
from families import tiny
from helpers import drafted, prompt
from torch import Tensor

from kvkeep import KeepCache
from kvkeep.engine.answer import forward_one
from kvkeep.engine.batch import Read

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU")
NEW = 40


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "method,family", [*((one, "llama") for one in CAPTURED), *(("h2o", one) for one in sorted(CAPTURED_FAMILIES))]
)
def test_replays_are_near_steps(method: str, family: str, dtype: torch.dtype) -> None:
    """The bits are printed, with the milliseconds of a step: pytest -s."""
    model, ids = copy.deepcopy(tiny(family)).to(dtype).to(DEVICE), prompt(1, LENGTH + NEW, 3)
    ours, theirs = (KeepCache(model, method, CAPTURED[method]) for _ in range(2))
    same, times = list[bool](), ([], [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in [ids[0, :LENGTH].tolist(), *([one] for one in ids[0, LENGTH:].tolist())]:
            torch.cuda.synchronize()
            start = time.perf_counter()
            found = forward_one(model, Read(ours, part))
            torch.cuda.synchronize()
            middle = time.perf_counter()
            wanted = model(torch.tensor([part], device=DEVICE), cache=theirs, logits_to_keep=1).logits[0]
            torch.cuda.synchronize()
            times[0].append(middle - start), times[1].append(time.perf_counter() - middle)
            assert isinstance(found, Tensor)
            same.append(torch.equal(found, wanted))
            torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()))
    assert ours.graph.captured
    medians = [1000 * sorted(one[NEW // 2 :])[NEW // 4] for one in times]
    print(f"{method} {family} {dtype}: {sum(same)} of {len(same)} equal, {medians[0]:.2f} ms, {medians[1]:.2f} without")


@pytest.mark.parametrize("method", ["snapkv:window=4,kernel=3+verified:6", "duo-attention:sinks=2+verified:5"])
def test_captured_drafts_change_no_token(method: str) -> None:
    model = copy.deepcopy(tiny("llama")).to(DEVICE)
    cache = KeepCache(model, method, 40, checkpoint="kv", where="host")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = drafted(model, cache, prompt(1, LENGTH), NEW, copies=False)
    assert cache.graph.captured and found.drafted
    assert found.tokens == drafted(model, KeepCache(model), prompt(1, LENGTH), NEW, copies=False).tokens
