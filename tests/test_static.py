"""A decoding step of a bounded cache whose budget is full: the same shapes each time, and no question to the device.

That is what torch.compile needs to compile once, and a GPU to run ahead of Python. Watched at the level of torch's
operators, so no GPU is needed to see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import VOCABULARY, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvkeep import KeepCache

ASKING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal")
"""Operators that wait for the device, because Python or the shape of a result needs to know a number."""

BOUNDED = (
    *((name, 16) for name in ("window", "streaming-llm", "h2o", "snapkv", "tova", "knorm", "random")),
    *((name, 64) for name in ("pyramidkv", "duo-attention")),
)
READ = 120


class Watch(TorchDispatchMode):
    """Notes each operator with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        self.shapes.append((func._schema.name.removeprefix("aten::"), [tensor.shape for tensor in tensors]))
        return result

    def asked(self) -> list[str]:
        return [name for name, _ in self.shapes if name in ASKING]


def steps(method: str, budget: int, given: Callable[[int], dict[str, Any]] = lambda length: {}) -> list[Watch]:
    """Return what two decoding steps do after a text that has filled the budget; ``given``: what goes with a step."""
    model = tiny("llama")
    cache = KeepCache(model, method, budget)
    ids = torch.randint(1, VOCABULARY, (2, READ + 3), generator=torch.Generator().manual_seed(0))
    watches = [Watch(), Watch()]
    with torch.inference_mode():
        model(ids[:, :READ], cache=cache, **given(READ))
        model(ids[:, READ : READ + 1], cache=cache, **given(READ + 1))
        for number, watch in enumerate(watches, READ + 1):
            with watch:
                model(ids[:, number : number + 1], cache=cache, **given(number + 1))
    return watches


@pytest.mark.turns(3)
@pytest.mark.parametrize("method,budget", BOUNDED)
def test_a_step_has_the_same_shapes_and_asks_nothing(method: str, budget: int) -> None:
    one, two = steps(method, budget)
    assert one.shapes == two.shapes
    assert not one.asked()


def test_padding_is_looked_at_once() -> None:
    """By the ledger, on the host; and by transformers, which makes the mask."""

    def given(length: int) -> dict[str, Any]:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, :5] = 0
        return {"attention_mask": mask}

    assert steps("h2o", 16, given)[1].asked().count("is_nonzero") <= 2


@pytest.mark.slow
def test_a_compiled_step_gives_the_same_and_is_compiled_no_more() -> None:
    """torch.compile breaks its graph where kvkeep asks whose pass is running; the pieces are found again each step."""
    from torch._dynamo.utils import counters

    model = tiny("llama")
    ids = torch.randint(1, VOCABULARY, (1, 36), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    outputs, graphs = [], []
    for step in (model, torch.compile(model, backend="eager")):
        cache = KeepCache(model, "window", 16)
        with torch.inference_mode():
            model(ids[:, :30], cache=cache)
            for number in range(30, 36):
                outputs.append(step(ids[:, number : number + 1], cache=cache).logits)
                graphs.append(counters["stats"]["unique_graphs"])
    assert all(torch.equal(plain, compiled) for plain, compiled in zip(outputs[:6], outputs[6:], strict=True))
    assert graphs[-4] == graphs[-1] > graphs[5]
    torch._dynamo.reset()
