"""What is shown is what attention did, and showing it changes nothing."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny

from kvkeep.models.binding import bind
from kvkeep.models.watching import Attended, grouped, watching


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_weights_and_values_make_the_output(family: str) -> None:
    model = tiny(family)
    decoder = bind(model).decoder
    ids = torch.randint(0, VOCABULARY, (1, 21), generator=torch.Generator().manual_seed(3))
    shown: list[Attended] = []
    with watching(shown.append):
        watched = decoder(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.allclose(watched, decoder(input_ids=ids, use_cache=False).last_hidden_state, atol=1e-5)
    assert [attended.layer for attended in shown] == list(range(4))
    at = torch.tensor([0, 7, 20])
    for attended in shown:
        weights = attended.weights(at)
        assert torch.allclose(weights.sum(-1), torch.ones(()))
        assert not weights.masked_select(~attended.visible(at).expand_as(weights)).any()
        made = weights @ grouped(attended.value, attended.query.shape[1])
        assert torch.allclose(made, attended.output[:, :, at], atol=1e-4)
        assert not weights[:, :, 1, 8:].any()  # nothing ahead
        if family == "gemma3":
            assert bool(weights[:, :, 2, :12].any()) == (attended.layer % 2 == 1)  # windows of 8
