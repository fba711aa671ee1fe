"""E is the gradient of the loss by the head's output, and what is told of it adds up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import VOCABULARY, tiny
from kvkeep_lab.studies.alignment import MEASURES, AlignmentStudy, backward
from measuring import measured

IDS = torch.randint(0, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "deepseek_v3", "gemma4"])
def test_rows(family: str) -> None:
    found = measured(AlignmentStudy(queries=6), family, IDS)
    assert len(found.rows) == 16 and len(found.queries) == 6 and min(found.queries) == 20 and max(found.queries) == 38
    assert found.loss > 0
    for row in found.rows:
        seen = sum(min(at, 7) if family.startswith("gemma") and row.layer % 2 == 0 else at for at in found.queries)
        assert row.pairs == seen
        assert all(-1 <= value <= 1 for value in (row.cos11, row.cos12, row.cos22, row.corr22, row.corr12))
        assert row.size >= abs(row.cos11)
        assert all(0 <= value <= 1 for value in (row.agree, row.agree_alike, row.convex, row.convex_closed))
    assert found.mean("cos11", 2) == pytest.approx(sum(row.cos11 for row in found.rows if row.layer == 2) / 4)
    assert set(MEASURES) <= set(vars(found.rows[0]))
    assert all(parameter.grad is None for parameter in tiny(family).parameters())


def test_gradients_are_finite_differences() -> None:
    """Move one head's output at one position, by hand, and see what the loss does."""
    model, layer, head, position = tiny("llama"), 1, 2, 30
    seen, gradients, _ = backward(model, IDS, 20)
    assert [attended.layer for attended in seen] == [0, 1, 2, 3]
    step = torch.randn(8, generator=torch.Generator().manual_seed(1))
    output = model.model.layers[layer].self_attn.o_proj

    def loss(size: float) -> float:
        def move(module: Any, args: Any) -> Any:
            moved = args[0].clone()
            moved[0, position, 8 * head : 8 * head + 8] += size * step
            return (moved,)

        handle = output.register_forward_pre_hook(move)
        with torch.no_grad():
            logits = model(IDS, use_cache=False).logits[0, :-1]
        handle.remove()
        return float(F.cross_entropy(logits.double(), IDS[0, 1:], reduction="sum"))

    expected = (loss(1e-2) - loss(-1e-2)) / 2e-2
    gradient = gradients[layer]
    assert gradient is not None
    assert float(gradient[0, head, position] @ step) == pytest.approx(expected, rel=2e-2)


def test_weights_that_need_no_gradient() -> None:
    """Quantised or frozen models have none; E has one all the same."""
    model = tiny("llama")
    expected = measured(AlignmentStudy(queries=4), ids=IDS)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        assert measured(AlignmentStudy(queries=4), ids=IDS) == expected
    finally:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
