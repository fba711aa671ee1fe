"""A step is what was asked, by lane: whose query heads read which KV head, who sees what is new, what comes back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvkeep.attention import attend
from kvkeep.attention.step import Step


def folded(queries: int, new: int, mask: Tensor | None = None, heads: int = 2) -> tuple[Step, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 3 * heads, queries, 8, generator=generator)
    key, value = (torch.randn(3, heads, new, 8, generator=generator) for _ in range(2))
    return Step.of(SimpleNamespace(), query, key, value, mask, 0.4, heads, True, True), query, key, value


@pytest.mark.parametrize(("queries", "new"), [(1, 1), (4, 4), (2, 4), (1, 4)])
def test_lanes_are_the_kv_heads_of_rows_and_what_is_new_is_seen_causally(queries: int, new: int) -> None:
    """Also where only the last tokens' queries were asked for; the answer is folded back as it was asked."""
    step, query, key, value = folded(queries, new)
    assert (step.new, step.queries, step.latent) == (new, queries, False)
    assert step.query.shape == (6, 3, queries, 8) and step.key.shape == (6, 1, new, 8)
    ours = step.unfolded(attend(step.query, [step.arriving()], 0.4)[0])
    seen = torch.ones(new, new, dtype=torch.bool).tril()[new - queries :]
    scores = query.double() @ key.double().repeat_interleave(3, 1).transpose(2, 3) * 0.4
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    torch.testing.assert_close(ours.double(), weights @ value.double().repeat_interleave(3, 1), atol=1e-5, rtol=1e-5)


def test_a_callers_mask_is_by_lane_and_wide_where_it_covers_the_past() -> None:
    over_new, over_all = (torch.rand(3, 1, 4, size) > 0.3 for size in (4, 11))
    for mask in (None, over_new):
        step = folded(4, 4, mask)[0]
        assert step.wide(7) is None
    assert folded(4, 4, over_new)[0].arriving().mask.tolist() == over_new.repeat_interleave(2, 0).tolist()
    step = folded(4, 4, over_all)[0]
    wide = step.wide(7)
    assert wide is not None and torch.equal(wide, over_all.repeat_interleave(2, 0)) and step.wide(6) is None
    assert torch.equal(step.arriving().mask, over_all[..., 7:].repeat_interleave(2, 0))
    assert torch.equal(folded(4, 4, over_all[:1])[0].wide(7), over_all[:1].expand(6, -1, -1, -1))


def test_what_a_module_expands_is_expanded() -> None:
    latent = SimpleNamespace(expand_kv=lambda keys, values: (keys * 2, values * 3))
    key = torch.randn(2, 1, 3, 8)
    step = Step.of(latent, key, key, key, None, 1.0, 1, True, True)
    assert step.latent and torch.equal(step.expanded(key, key)[1], key * 3)
